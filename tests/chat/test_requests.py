# SPDX-License-Identifier: Apache-2.0
"""What a request's own fields do: reasoning switches, mistakes, and the Responses and Anthropic endpoints."""

import json

import pytest

from .answers import ONE, ONE_CALL
from .dialect import TOOLS, spell
from .driver import USER, Refused

pytestmark = pytest.mark.vllm
REASONED = {"role": "assistant", "content": "A", "reasoning": "R"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "o"}
DEEP = "[" * 100_000
IMAGE = "<｜deepseek_image｜>"


def history(arguments) -> list[dict]:
    """A conversation whose assistant has called f."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT]


def kwargs(**given) -> dict:
    return {"chat_template_kwargs": given}


# Fields of a request, and whether the model reasons.
SWITCHES = {
    "nothing": ({}, True),
    "thinking-off": (kwargs(thinking=False), False),
    "enable_thinking-off": (kwargs(enable_thinking=False), False),
    "thinking-on": (kwargs(thinking=True), True),
    "both-off": (kwargs(thinking=False, enable_thinking=False), False),
    "thinking-null": (kwargs(thinking=None), True),
    "deepseek-disabled": ({"thinking": {"type": "disabled"}}, False),
    "deepseek-enabled": ({"thinking": {"type": "enabled"}}, True),
    "deepseek-disabled-in-kwargs": (kwargs(thinking={"type": "disabled"}), False),
    "A07-off-beside-an-effort": ({"reasoning_effort": "high", **kwargs(thinking=False)}, False),
    "off-beside-an-effort": ({"reasoning_effort": "max", **kwargs(enable_thinking=False)}, False),
    "deepseek-disabled-beside-an-effort": ({"reasoning_effort": "high", "thinking": {"type": "disabled"}}, False),
    "effort-none": ({"reasoning_effort": "none"}, False),
    "X21-effort-none-beside-on": ({"reasoning_effort": "none", **kwargs(thinking=True)}, False),
    "effort-none-in-kwargs": (kwargs(reasoning_effort="none"), False),
    "effort-low": ({"reasoning_effort": "low"}, True),
}


@pytest.mark.parametrize("fields, thinks", SWITCHES.values(), ids=SWITCHES)
def test_prompt_and_parser_agree_on_reasoning(server, fields, thinks):
    seen = server.seen_of(lambda key: server.chat("words", request_id=key, **fields))
    assert seen["prompt"].endswith("<｜Assistant｜>" + ("<think>" if thinks else "</think>"))
    answer = server.chat("words", **fields)
    assert (answer.reasoning, answer.content) == (("words", "") if thinks else ("", "words"))


def test_a10_a_number_is_v41s_effort(servers):
    assert "Reasoning Effort: 30 " in servers["v41"].prompt(**kwargs(reasoning_effort=30))
    for version, effort in (("v41", 0), ("v41", 101), ("v41", True), ("v41", "30"), ("v41", 50.0), ("v4", 30)):
        with pytest.raises(Refused, match="reasoning_effort") as refused:
            servers[version].chat("a", **kwargs(reasoning_effort=effort))
        assert refused.value.status == 400


# Requests that are mistakes, and a word of the sentence that says so.
MISTAKES = {
    "no-messages": ({"messages": []}, "messages is empty"),
    "A11-unknown-task": ({"messages": [{**USER, "task": "bogus"}]}, "task"),
    "A11-tools-of-a-message": ({"messages": [{"role": "system", "content": "S", "tools": [{"x": 1}]}, USER]}, "tools"),
    "A11-empty-developer": ({"messages": [USER, {"role": "developer", "content": ""}]}, "developer"),
    "X17-latest-reminder": ({"messages": [{"role": "latest_reminder", "content": "x"}]}, "latest_reminder"),
    "X20-role-function": ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "function"),
    "X19-no-parts": ({"messages": [{"role": "user", "content": []}]}, "empty list"),
    "content-null": ({"messages": [{"role": "user", "content": None}]}, "content"),
    "content-number": ({"messages": [{"role": "user", "content": 5}]}, "content"),
    "part-without-text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    "A12-image-token-in-a-text": ({"messages": [{"role": "user", "content": f"see {IMAGE}"}]}, "image token"),
    "image-token-in-a-part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": IMAGE}]}]},
        "image token",
    ),
    "image-token-in-a-result": ({"messages": [*history("{}")[:2], {**RESULT, "content": IMAGE}]}, "image token"),
    "image-token-in-reasoning": ({"messages": [USER, {**REASONED, "reasoning": IMAGE}, USER]}, "image token"),
    "A13-image-token-in-an-argument": ({"messages": history(json.dumps({"a": [{"b": IMAGE}]}))}, "image token"),
    "image-token-in-an-argument-name": ({"messages": history(json.dumps({IMAGE: 1}))}, "image token"),
    "A13-image-token-in-a-tool": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": IMAGE}}]},
        "image token",
    ),
    "switch-is-text": (kwargs(thinking="false"), "thinking must be"),
    "switches-disagree": (kwargs(thinking=True, enable_thinking=False), "disagree"),
    "deepseek-switch-is-a-number": ({"thinking": 7}, "thinking must be"),
    "deepseek-switch-disagrees": ({"thinking": {"type": "enabled"}, **kwargs(thinking=False)}, "disagree"),
    "unknown-effort": (kwargs(reasoning_effort="ultra"), "reasoning_effort"),
    "drop-thinking-is-text": (kwargs(drop_thinking="x"), "drop_thinking"),
    "tools-in-kwargs": (kwargs(tools="x"), "tools"),
    "continue-a-user": (
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
    ),
    "continue-and-open": (
        {"messages": [USER, REASONED], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    "custom-tool-call": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "custom", "id": "c", "custom": {"name": "f", "input": "x"}}],
                },
            ]
        },
        "function",
    ),
    "tool-without-a-name": ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "name"),
    "choice-without-tools": ({"tool_choice": "auto"}, "tool_choice"),
}


@pytest.mark.parametrize("fields, word", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_a_400_with_a_sentence(server, fields, word):
    for ask in (server.chat, server.chat_stream):
        with pytest.raises(Refused, match=word) as refused:
            ask("a", **{"messages": [USER], **fields})
        assert refused.value.status == 400
    assert server.chat("t</think>still here").content == "still here"


# Arguments in the history that are no JSON object, and the parameter that they become.
BROKEN_ARGUMENTS = {
    "A14-cut": ('{"a": ', '«arguments=»{"a": «/»'),
    "A14-list": ("[1, 2]", "«arguments=»[1, 2]«/»"),
    "A14-encoded-twice": ('"{\\"a\\": \\"x\\"}"', "«a=»x«/»"),
    "text": ("hello", "«arguments=»hello«/»"),
    "number": ("5", "«arguments=»5«/»"),
    "deep": (DEEP, f"«arguments=»{DEEP}«/»"),
}


@pytest.mark.parametrize("arguments, parameter", BROKEN_ARGUMENTS.values(), ids=BROKEN_ARGUMENTS)
def test_broken_arguments_stay_in_the_history(server, version, arguments, parameter):
    assert spell(version, f"«f»\n{parameter}\n«/f»") in server.prompt(history(arguments), tools=list(TOOLS))


@pytest.mark.parametrize("arguments", ("", "{}", "null"))
def test_no_arguments_are_no_parameters(server, version, arguments):
    assert spell(version, "«f»\n\n«/f»") in server.prompt(history(arguments), tools=list(TOOLS))


@pytest.mark.parametrize(
    "fields", ({"reasoning": "RC"}, {"reasoning_content": "RC"}, {"reasoning": None, "reasoning_content": "RC"})
)
def test_a17_reasoning_by_either_name(server, fields):
    messages = history("{}")
    messages[1].update(fields)
    assert "<think>RC</think>" in server.prompt(messages, tools=list(TOOLS))


def test_a19_an_answer_behind_an_assistant_message(server):
    """The prompt opens a turn and its reasoning, and whole and streamed answers know it."""
    for messages, fields, expected in (
        ([USER, REASONED], {}, ("cont", "")),
        ([USER, REASONED], {"continue_final_message": True, "add_generation_prompt": False}, ("", "cont")),
        (
            [USER, {**REASONED, "content": ""}],
            {"continue_final_message": True, "add_generation_prompt": False},
            ("cont", ""),
        ),
    ):
        for ask in (server.chat, server.chat_stream):
            answer = ask("cont", messages, **fields)
            assert (answer.reasoning, answer.content) == expected


def test_a20_a_grammar_waits_for_the_reasoning(server):
    fields = {"response_format": {"type": "json_object"}}
    for hidden in (False, True):
        seen = server.seen_of(
            lambda key: server.chat("t</think>{}", request_id=key, include_reasoning=not hidden, **fields)
        )
        assert seen["reasoning_ended"] is False and "json_object=True" in seen["grammar"]
    seen = server.seen_of(
        lambda key: server.chat("{}", request_id=key, include_reasoning=False, **kwargs(thinking=False), **fields)
    )
    assert seen["reasoning_ended"] is True


def test_a27_tokens_of_the_reasoning_are_counted(server):
    body = server.chat("think</think>hi", logprobs=True, top_logprobs=2).raw
    assert len(body["choices"][0]["logprobs"]["content"]) == 4
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1


def test_a38_a_long_argument_is_streamed(server, version):
    answer = server.chat_stream(
        spell(version, "t</think>«calls»\n«f»\n«a=»" + "word " * 200 + "«/»\n«/f»\n«/calls»"), tools=list(TOOLS)
    )
    assert max(answer.argument_pieces[0]) < 40 and sum(answer.argument_pieces[0]) > 1000


def test_deepseeks_prefix_is_continued(server):
    messages = [USER, {"role": "assistant", "content": "begun", "prefix": True}]
    assert server.prompt(messages).endswith("</think>begun")
    assert server.chat(" and done", messages).content == " and done"


@pytest.mark.parametrize("depth", (100, 500, 900, 990, 2000))
def test_nested_arguments_are_shown_or_refused(server, depth):
    nested = '{"a": ' + "[" * depth + "]" * depth + "}"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": json.loads("[" * 90 + "]" * 90)}}}
    try:
        prompt = server.prompt(history(nested), tools=[tool])
    except Refused as refused:
        assert refused.status == 400
    else:
        assert "[" * depth in prompt
    assert server.chat("t</think>still here").content == "still here"


# -- the Responses endpoint


def responses(server, script: str, **fields):
    status, body = server.post(
        "/v1/responses", {"model": server.model, "input": "Q", "vllm_xargs": {"script": script}, **fields}
    )
    if status != 200:
        raise Refused(status, body)
    return body


@pytest.mark.parametrize(
    "effort, thinks",
    (
        ("none", False),
        ("minimal", True),
        ("low", True),
        ("medium", True),
        ("high", True),
        ("xhigh", True),
        ("max", True),
    ),
)
def test_a28_responses_effort(server, effort, thinks):
    body = responses(server, "t</think>a" if thinks else "a", reasoning={"effort": effort})
    assert [item["type"] for item in body["output"]] == ["reasoning"] * thinks + ["message"]
    assert body["output"][-1]["content"][0]["text"] == "a"


def test_responses_switch_off_beside_an_effort(server):
    body = responses(server, "a", reasoning={"effort": "high"}, **kwargs(thinking=False))
    assert [item["type"] for item in body["output"]] == ["message"]


FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_responses_calls(server, version):
    body = responses(server, spell(version, "t</think>Sure.\n\n" + ONE), tools=FLAT_TOOLS)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call"]
    call = body["output"][-1]
    assert (call["name"], call["arguments"], call["status"]) == (*ONE_CALL, "completed")


def test_responses_call_cut_by_a_stop_string(server, version):
    body = responses(server, spell(version, "t</think>" + ONE), tools=FLAT_TOOLS, stop=["this"])
    call = body["output"][-1]
    assert (call["arguments"], call["status"]) == ('{"a": "hello world ', "incomplete")


def test_responses_show_every_part_and_every_instruction(server):
    given = [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "m1",
            "status": "completed",
            "content": [{"type": "output_text", "text": text, "annotations": []} for text in ("three", "four")],
        },
        {"role": "developer", "content": "DEV"},
        {"role": "user", "content": "five"},
    ]
    responses(server, "t</think>a", input=given, instructions="INSTRUCT")
    prompt = server.seen()[-1]["prompt"]
    places = [prompt.index(text) for text in ("INSTRUCT", "SYS", "one", "two", "three", "four", "DEV", "five")]
    assert places == sorted(places)


def test_responses_continue_an_incomplete_message(server):
    part = {"type": "output_text", "text": "begun", "annotations": []}
    given = [
        {"role": "user", "content": "Q"},
        {"type": "message", "role": "assistant", "id": "m1", "status": "incomplete", "content": [part]},
    ]
    body = responses(server, " and done", input=given)
    assert server.seen()[-1]["prompt"].endswith("</think>begun")
    assert body["output"][-1]["content"][0]["text"] == " and done"


def test_responses_tools_as_sent(server):
    responses(server, "t</think>a", tools=[{"type": "function", "name": "f"}])
    assert '\n{"name": "f"}\n' in server.seen()[-1]["prompt"]


@pytest.mark.parametrize(
    "fields, word", (({"input": []}, "messages is empty"), (kwargs(thinking=1), "thinking must be"))
)
def test_responses_mistakes(server, fields, word):
    with pytest.raises(Refused, match=word) as refused:
        responses(server, "a", **fields)
    assert refused.value.status == 400


# -- the Anthropic endpoint


def anthropic(server, script: str, **fields) -> dict:
    body = {"model": server.model, "max_tokens": 300, "messages": [USER], "vllm_xargs": {"script": script}, **fields}
    status, answer = server.post("/v1/messages", body)
    if status != 200:
        raise Refused(status, answer)
    return answer


ANTHROPIC_TOOLS = [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}]


def test_a18_anthropic_system_messages_stay_in_place(server):
    messages = [USER, {"role": "assistant", "content": "A"}, {"role": "system", "content": "REMIND"}, USER]
    anthropic(server, "t</think>a", system="SYS", messages=messages)
    prompt = server.seen()[-1]["prompt"]
    assert prompt.index("SYS") < prompt.index("<｜User｜>") < prompt.index("REMIND")


def test_anthropic_system_blocks_are_not_glued(server):
    anthropic(server, "t</think>a", system=[{"type": "text", "text": "ONE"}, {"type": "text", "text": "TWO"}])
    assert "ONE\n\nTWO" in server.seen()[-1]["prompt"]


def test_anthropic_prefill_is_continued(server):
    answer = anthropic(server, " and done", messages=[USER, {"role": "assistant", "content": "begun"}])
    assert server.seen()[-1]["prompt"].endswith("</think>begun")
    assert [block["text"] for block in answer["content"]] == [" and done"]


def test_anthropic_thinking(server):
    blocks = anthropic(server, "t</think>a", max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})[
        "content"
    ]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert [block["type"] for block in anthropic(server, "a", thinking={"type": "disabled"})["content"]] == ["text"]
    assert server.seen()[-1]["prompt"].endswith("</think>")


def test_anthropic_tool_use(server, version):
    answer = anthropic(server, spell(version, "t</think>" + ONE), tools=ANTHROPIC_TOOLS)
    assert (answer["content"][-1]["name"], answer["content"][-1]["input"]) == ("f", {"a": "hello world this is long"})
    assert answer["stop_reason"] == "tool_use"
    assert '{"name": "f", "parameters": {"type": "object"' in server.seen()[-1]["prompt"]


@pytest.mark.parametrize(
    "fields, reason", (({"max_tokens": 32}, "max_tokens"), ({"stop_sequences": ["this"]}, "stop_sequence"))
)
def test_anthropic_cut_tool_use_is_not_handed_over(server, version, fields, reason):
    answer = anthropic(server, spell(version, "t</think>" + ONE), tools=ANTHROPIC_TOOLS, **fields)
    assert (answer["stop_reason"], [block["type"] for block in answer["content"]]) == (reason, ["thinking"])
