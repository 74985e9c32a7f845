# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong in every way, and answers of broken markup: no 5xx, no hang, no lost server.

5,000 requests in all. The seeds are fixed, so that a fault stays one; `make test-long` takes fresh ones.
"""

import json
import random
import time
from itertools import islice

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from . import fuzz
from .dialect import TOOLS
from .driver import USER, Answer, Refused, ScriptedServer

pytestmark = pytest.mark.vllm
# Decision endpoints, which only models with such a head have, and elastic expert parallelism, which restarts engines.
NOT_HERE = ("/v1/systemone", "/v1/decisions", "/scale_elastic_ep")


def assert_unharmed(server: ScriptedServer, outcome: fuzz.Outcome) -> None:
    """No fault of the server's, and it answers as before; nothing is left in its core."""
    shown = [(request.path, status, answer, request.body[:2000]) for request, status, answer in outcome.faults[:5]]
    assert not outcome.faults, f"{len(outcome.faults)} of {outcome.statuses.total()}: {shown}"
    assert server.chat("thought</think>still here") == Answer("thought", "still here", [], "stop")
    deadline = time.monotonic() + 30
    while server.live() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.live() == []


def malformed_requests(server, seed: int, count: int) -> None:
    outcome = fuzz.send(server.base_url, fuzz.malformed(random.Random(seed), count))
    assert_unharmed(server, outcome)
    assert outcome.statuses[400] > count / 3 and outcome.statuses[200] > 0


def broken_answers(server, version: str, seed: int, count: int) -> None:
    """Each whole and streamed. That the two agree is test_generated's matter."""
    texts = list(islice(fuzz.answers(random.Random(seed), version), count))
    requests = [
        fuzz.Request(
            "/v1/chat/completions",
            json.dumps(
                {
                    "model": "m",
                    "messages": [USER],
                    "tools": list(TOOLS),
                    "stream": stream,
                    "max_tokens": 2000,
                    "vllm_xargs": {"script": text, "chunk": 1 + number % 7},
                }
            ).encode(),
        )
        for number, text in enumerate(texts)
        for stream in (False, True)
    ]
    outcome = fuzz.send(server.base_url, requests)
    assert_unharmed(server, outcome)
    assert outcome.statuses == {200: 2 * count}


@pytest.mark.parametrize("value", ("x", 5, 1.5, ["x"]))
def test_a_constraint_of_another_type_is_a_mistake(server, value):
    with pytest.raises(Refused) as refused:
        server.chat("a", structured_outputs=value)
    assert refused.value.status == 400
    assert (
        server.post("/v1/completions", {"model": "m", "prompt": "P", "structured_outputs": value, **fuzz.SCRIPT})[0]
        == 400
    )


@pytest.mark.parametrize("name", ("truncation", "background"))
def test_a_null_that_the_request_may_have(server, name):
    body = {"model": "m", "input": "Q", name: None, **fuzz.SCRIPT}
    assert server.post("/v1/responses", body)[0] == 200
    assert server.events_of("/v1/responses", body | {"stream": True})[-1]["type"] == "response.completed"


def test_malformed_requests(server, version):
    malformed_requests(server, {"v4": 4, "v41": 41}[version], 2000)


def test_broken_answers(server, version):
    broken_answers(server, version, {"v4": 4, "v41": 41}[version], 250)


@pytest.mark.long
def test_malformed_requests_of_a_fresh_seed(server, version):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    malformed_requests(server, seed, 5000)
    broken_answers(server, version, seed, 2000)


def test_requests_of_the_openapi_document(servers):
    """Both what the document allows and what it forbids, for each operation that takes anything."""
    server, outcome = servers["v41"], fuzz.Outcome()
    schema = schemathesis.openapi.from_url(server.base_url + "/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    operations = [one for one in operations if (one.body or one.path_parameters) and one.path not in NOT_HERE]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize"} <= {
        one.path for one in operations
    }
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if operation.path.endswith("/cancel") and mode is GenerationMode.NEGATIVE:
                continue  # any text is a valid id

            @settings(
                max_examples=25,
                deadline=None,
                derandomize=True,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case):
                if isinstance(case.body, dict):
                    case.body.pop("use_beam_search", None)  # is to go on for max_tokens steps, 300,000 here
                answer = case.call(base_url=server.base_url, timeout=fuzz.LIMIT_S)
                outcome.add(
                    fuzz.Request(case.operation.path, repr(case.body).encode()), answer.status_code, answer.content
                )

            send()
    assert_unharmed(server, outcome)
    assert outcome.statuses[400] > 150 and outcome.statuses.total() > 500
