# SPDX-License-Identifier: Apache-2.0
"""Every case of answers.py over HTTP, whole and streamed token by token."""

import json

import pytest

from .answers import CASES, Case
from .dialect import spell
from .driver import Answer, assert_same

pytestmark = pytest.mark.vllm


def spelt(version: str, case: Case) -> tuple[str, Answer, dict]:
    """The answer, what the client must get, and the request's fields, for one version."""

    def deep(value):
        if isinstance(value, str):
            return spell(version, value)
        if isinstance(value, list):
            return [deep(item) for item in value]
        return value

    calls = [(name, _spelt_arguments(version, arguments)) for name, arguments in case.calls]
    expected = Answer(spell(version, case.reasoning), spell(version, case.content), calls, case.finish_reason)
    request = {name: deep(value) for name, value in case.request.items()}
    if isinstance(request.get("max_tokens"), dict):
        request["max_tokens"] = request["max_tokens"][version]
    return spell(version, case.answer), expected, request | ({"tools": list(case.tools)} if case.tools else {})


def _spelt_arguments(version: str, arguments: str) -> str:
    if "«" not in arguments:
        return arguments
    return json.dumps(
        {name: spell(version, value) for name, value in json.loads(arguments).items()}, ensure_ascii=False
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_whole_and_streamed(server, version, case):
    answer, expected, request = spelt(version, case)
    whole = server.chat(answer, **request)
    assert whole == expected
    assert_same(whole, server.chat_stream(answer, **request))
    assert_same(whole, server.chat_stream(answer, xargs={"chunk": 5}, **request))
