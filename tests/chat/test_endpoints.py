# SPDX-License-Identifier: Apache-2.0
"""The Responses and Anthropic endpoints: streamed equals whole on the cases of answers.py, and stored conversations."""

import json

import pytest

from .answers import CASES, ONE
from .dialect import STRING, spell
from .driver import USER

pytestmark = pytest.mark.vllm
# Cases whose request has nothing that only the chat endpoint knows.
PLAIN = [case for case in CASES if not case.request and case.tools]
EVERY = pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.id)


def responses_tools(case) -> list[dict]:
    return [{"type": "function", **tool["function"]} for tool in case.tools]


def shown(items: list[dict]) -> list[tuple]:
    """Response items without their ids."""
    kept = []
    for item in items:
        if item["type"] == "function_call":
            kept.append(("call", item["name"], item["arguments"], item["status"]))
        else:
            kept.append((item["type"], "".join(part["text"] for part in item["content"])))
    return kept


@EVERY
def test_responses_streamed_equals_whole(server, version, case):
    body = {
        "model": server.model,
        "input": "Q",
        "tools": responses_tools(case),
        "vllm_xargs": {"script": spell(version, case.answer)},
    }
    status, whole = server.post("/v1/responses", body)
    assert status == 200
    expected = [("reasoning", spell(version, case.reasoning))] * bool(case.reasoning)
    expected += [("message", spell(version, case.content))] * bool(case.content)
    assert shown(whole["output"])[: len(expected)] == expected
    assert len(shown(whole["output"])) == len(expected) + len(case.calls)
    events = server.events_of("/v1/responses", body | {"stream": True})
    assert events[-1]["type"] == "response.completed"
    # Content behind a call comes last in a stream.
    assert sorted(shown(events[-1]["response"]["output"])) == sorted(shown(whole["output"]))
    for item in events[-1]["response"]["output"]:
        if item["type"] == "function_call":
            pieces = [
                event["delta"]
                for event in events
                if event["type"] == "response.function_call_arguments.delta" and event["item_id"] == item["id"]
            ]
            assert "".join(pieces) == item["arguments"]


def blocks_of(events: list[dict]) -> list[dict]:
    """The content blocks that an Anthropic stream adds up to."""
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            blocks[-1]["json"] = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for kind, field in (("thinking_delta", "thinking"), ("text_delta", "text")):
                if delta["type"] == kind:
                    blocks[-1][field] += delta[field]
            if delta["type"] == "input_json_delta":
                blocks[-1]["json"] += delta["partial_json"]
    return blocks


def told(block: dict) -> tuple:
    if block["type"] == "tool_use":
        return "tool_use", block["name"], json.loads(block["json"]) if block.get("json") else block["input"]
    return block["type"], block[{"text": "text", "thinking": "thinking"}[block["type"]]]


@EVERY
def test_anthropic_streamed_equals_whole(server, version, case):
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in case.tools]
    body = {
        "model": server.model,
        "max_tokens": 2000,
        "messages": [USER],
        "tools": tools,
        "vllm_xargs": {"script": spell(version, case.answer)},
    }
    status, whole = server.post("/v1/messages", body)
    assert status == 200
    events = server.events_of("/v1/messages", body | {"stream": True})
    streamed = [told(block) for block in blocks_of(events)]
    # A whole answer of nothing has one empty text; content behind a call closes the call's block in a stream.
    expected = [told(block) for block in whole["content"]]
    assert sorted(map(str, streamed or [("text", "")])) == sorted(map(str, expected))
    stop = next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")
    assert stop == whole["stop_reason"] == ("tool_use" if case.calls else "end_turn")


def test_a_stored_conversation_keeps_calls_and_instructions(server, version):
    """previous_response_id: the calls stay, a system message of the input stays, the old instructions go."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": STRING}}}]

    def ask(script, **fields) -> dict:
        body = {"model": server.model, "tools": tools, "vllm_xargs": {"script": spell(version, script)}, **fields}
        status, answer = server.post("/v1/responses", body)
        assert status == 200, answer
        return answer

    first = ask(
        "R1</think>" + ONE,
        instructions="OLD",
        input=[{"role": "system", "content": "SYS"}, {"role": "user", "content": "Q"}],
    )
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "RESULT"}
    second = ask("R2</think>done", instructions="FRESH", input=[result], previous_response_id=first["id"])
    prompt = server.seen()[-1]["prompt"]
    assert "OLD" not in prompt
    places = [
        prompt.index(text) for text in ("FRESH", "SYS", "<｜User｜>Q", "R1</think>", spell(version, ONE), "RESULT")
    ]
    assert places == sorted(places)
    ask("t</think>a", input="And then?", previous_response_id=second["id"])
    prompt = server.seen()[-1]["prompt"]
    assert "FRESH" not in prompt and "R2</think>done" in prompt and spell(version, ONE) in prompt


CUSTOM = [{"type": "custom", "name": "patch", "description": "Applies a patch."}]


@pytest.mark.parametrize("cut", (False, True))
def test_a_custom_tool_gets_its_text(server, version, cut):
    payload = '*** Begin\n+ "quoted" \\ 世界 🎉\n' * 5
    script = spell(version, f"t</think>«calls»\n«patch»\n«input=»{payload}«/»\n«/patch»\n«/calls»")
    body = {"model": server.model, "input": "Q", "tools": CUSTOM, "vllm_xargs": {"script": script}}
    body |= {"max_output_tokens": 60} if cut else {}
    status, whole = server.post("/v1/responses", body)
    assert status == 200
    text = whole["output"][-1]["input"]
    assert (payload.startswith(text) and 10 < len(text) < len(payload)) if cut else text == payload
    assert whole["status"] == ("incomplete" if cut else "completed")
    events = server.events_of("/v1/responses", body | {"stream": True})
    assert events[-1]["response"]["output"][-1]["input"] == text
    pieces = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(pieces) == text and len(pieces) > 3
