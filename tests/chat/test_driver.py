# SPDX-License-Identifier: Apache-2.0
"""The scripted server says what it was told to, on every endpoint, and shows what reached its core."""

import pytest

from .driver import USER, Answer, Refused, assert_same

pytestmark = pytest.mark.vllm


def test_a_script_comes_back_whole_and_streamed(server):
    whole = server.chat("thought</think>some words")
    assert whole == Answer("thought", "some words", [], "stop")
    assert_same(whole, server.chat_stream("thought</think>some words"))


def test_a_stream_has_a_delta_for_every_token(server):
    streamed = server.chat_stream("a</think>" + "word " * 20)
    deltas = [c["delta"] for event in streamed.raw for c in event["choices"]]
    assert sum(bool(delta.get("content")) for delta in deltas) >= 20


def test_max_tokens_cuts(server):
    answer = server.chat("a</think>one two three four", max_tokens=4)
    assert (answer.content, answer.finish) == ("one two", "length")


def test_a_queue_serves_clients_that_name_no_script(server):
    server.queue("agent-7", [{"script": "x</think>first"}, {"script": "y</think>second"}])
    for expected in ("first", "second"):
        status, body = server.post(
            "/v1/messages",
            {"model": server.model, "max_tokens": 50, "messages": [USER], "vllm_xargs": {}},
            headers={"X-Request-Id": "agent-7"},
        )
        assert status == 200 and body["content"][-1]["text"] == expected
    assert len(server.seen("agent-7")) == 2


def test_what_reached_the_core_is_shown(server):
    seen = server.seen_of(lambda key: server.chat("a</think>b", request_id=key, stop=["zz"], max_tokens=9))
    assert seen["prompt"].endswith("<｜User｜>Q<｜Assistant｜><think>")
    assert (seen["stop"], seen["max_tokens"], seen["grammar"]) == (["zz"], 9, None)


def test_an_error_is_raised_with_its_sentence(server):
    with pytest.raises(Refused) as error:
        server.chat("a", temperature=-1)
    assert error.value.status == 400 and error.value.message
