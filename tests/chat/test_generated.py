# SPDX-License-Identifier: Apache-2.0
"""Generated conversations on the real server: its prompt is the format's, its answers are what the model wrote."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .dialect import TOOLS
from .driver import Answer, assert_same
from .generated import answers, conversations, soups
from .prompt_format import render

pytestmark = pytest.mark.vllm
OVER_HTTP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@OVER_HTTP
@given(messages=conversations, made=answers, tools=st.sampled_from(((), TOOLS)), chunk=st.integers(1, 9))
def test_a_conversation_and_its_answer(server, version, messages, made, tools, chunk):
    fields = {"tools": list(tools)} if tools else {}
    script = made.written(version) if tools else f"{made.reasoning}</think>{made.content}"
    calls = made.arguments_texts if tools else []
    seen = server.seen_of(lambda key: server.chat(script, messages, request_id=key, **fields))
    assert seen["prompt"] == render(version, messages, tools, effort="high" if version == "v4" else 75)
    whole = server.chat(script, messages, **fields)
    assert whole == Answer(made.reasoning, made.content, calls, "tool_calls" if calls else "stop")
    assert_same(whole, server.chat_stream(script, messages, xargs={"chunk": chunk}, **fields))


@OVER_HTTP
@given(
    soup=soups,
    max_tokens=st.integers(1, 60),
    stop=st.sampled_from(([], ["x"], ["</"], ["ke"])),
    chunk=st.integers(1, 9),
)
def test_markup_in_any_order_cut_anywhere(server, soup, max_tokens, stop, chunk):
    fields = {"tools": list(TOOLS), "max_tokens": max_tokens, "stop": stop}
    whole = server.chat(soup, **fields)
    assert_same(whole, server.chat_stream(soup, **fields))
    # A step of several tokens can run past max_tokens or a stop string; what is shown must not.
    assert_same(whole, server.chat_stream(soup, xargs={"chunk": chunk}, **fields))
