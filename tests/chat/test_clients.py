# SPDX-License-Identifier: Apache-2.0
"""Client libraries as people use them, each through an agent's loop of ten tool turns.

After every turn the client has shown what the model said, and after the last one the whole conversation has reached
the core. The arguments are ones that broke servers: markup, quotes, blanks at the ends, all of Unicode, many lines.
"""

import asyncio
import json
import uuid

import anthropic
import openai
import pytest
from pydantic import BaseModel

from .dialect import INTEGER, STRING, spell, tool

pytestmark = pytest.mark.vllm
TURNS = 10
PATHS = (
    "README.md",
    "a b/ü 世界.txt",
    'say "hi"',
    "back\\slash",
    "<think>not a thought</think>",
    "  blanks  ",
    "tab\tand\nline",
    "🎉" * 40,
    '{"json": [1, 2]}',
    "word " * 1500,
)
READ = tool("read", path=STRING, line=INTEGER)
# Both are said again in the prompt of the next turn.
ANSWERS = [
    {"reasoning": f"Thought {turn}.", "content": f"Turn {turn}:", "arguments": {"path": PATHS[turn], "line": turn}}
    for turn in range(TURNS)
]


def result_of(turn: int) -> str:
    return f"line {turn} of the file"


def scripts(version: str) -> list[dict]:
    """Ten turns with a call each, then an answer."""
    call = "«calls»\n«read»\n«path=»{path}«/»\n«line:»{line}«/»\n«/read»\n«/calls»"
    said = spell(version, "{reasoning}</think>{content}\n\n" + call)
    turns = [{"script": said.format(**answer, **answer["arguments"])} for answer in ANSWERS]
    return [*turns, {"script": "Last thought.</think>All read."}]


@pytest.fixture
def key(server, version):
    """A request id whose queue holds the conversation."""
    name = f"client-{uuid.uuid4().hex}"
    server.queue(name, scripts(version))
    return name


@pytest.fixture(params=(False, True), ids=("whole", "streamed"))
def stream(request):
    return request.param


def assert_prompt_holds_everything(prompt: str, thoughts: bool = True) -> None:
    """What each turn said and got stands in the prompt, in order."""
    at = prompt.index("Read ten files.")
    for turn, answer in enumerate(ANSWERS):
        for text in (
            *[answer["reasoning"]] * thoughts,
            answer["content"],
            answer["arguments"]["path"],
            result_of(turn),
        ):
            at = prompt.index(text, at) + len(text)


# -- openai


def reaching(server, key) -> dict:
    """Arguments of an openai client whose every request takes the next answer of a script."""
    return {"base_url": server.base_url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 120,
            "default_headers": {"X-Request-Id": key}}  # fmt: skip


@pytest.fixture
def openai_client(server, key):
    with openai.OpenAI(**reaching(server, key)) as client:
        yield client


def chat_turn(client, stream: bool, **fields) -> dict:
    """The message of one turn as a client keeps it: the sum of the deltas, or the whole one."""
    if not stream:
        return client.chat.completions.create(model="m", **fields).choices[0].message.model_dump(exclude_none=True)
    message = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
    for chunk in client.chat.completions.create(model="m", stream=True, **fields):
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", None) or ""
        for piece in delta.tool_calls or ():
            if piece.index == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": piece.id, "type": "function", "function": {"name": piece.function.name, "arguments": ""}}
                )
            message["tool_calls"][piece.index]["function"]["arguments"] += piece.function.arguments or ""
    return message if message["tool_calls"] else {**message, "tool_calls": None}


def test_openai_chat(server, openai_client, key, stream):
    messages = [{"role": "user", "content": "Read ten files."}]
    for turn, answer in enumerate(ANSWERS):
        message = chat_turn(openai_client, stream, messages=messages, tools=[READ])
        (call,) = message["tool_calls"]
        assert (message["reasoning"], message["content"]) == (answer["reasoning"], answer["content"])
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("read", answer["arguments"])
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": result_of(turn)}]
    last = chat_turn(openai_client, stream, messages=messages, tools=[READ])
    assert (last["reasoning"], last["content"]) == ("Last thought.", "All read.")
    assert_prompt_holds_everything(server.seen(key)[-1]["prompt"])


def test_openai_stream_helper(openai_client):
    """`chat.completions.stream` sums up the deltas itself, and parses the arguments of strict tools."""
    read = tool("read", path=STRING, line=INTEGER)
    read["function"]["strict"] = True
    with openai_client.chat.completions.stream(
        model="m", messages=[{"role": "user", "content": "Q"}], tools=[read]
    ) as events:
        message = events.get_final_completion().choices[0].message
    assert message.content == ANSWERS[0]["content"] and message.reasoning == ANSWERS[0]["reasoning"]
    assert message.tool_calls[0].function.parsed_arguments == ANSWERS[0]["arguments"]


class Place(BaseModel):
    name: str
    people: int


PLACE = Place(name="Zürich “west”", people=450000)
SAID = {"vllm_xargs": {"script": f"thought</think>{PLACE.model_dump_json()}"}}


def test_openai_structured_output(server, openai_client):
    message = (
        openai_client.chat.completions.parse(
            model="m", messages=[{"role": "user", "content": "Q"}], response_format=Place, extra_body=SAID
        )
        .choices[0]
        .message
    )
    assert (message.parsed, message.reasoning) == (PLACE, "thought")
    assert "json=" in server.seen()[-1]["grammar"]
    response = openai_client.responses.parse(model="m", input="Q", text_format=Place, extra_body=SAID)
    assert response.output_parsed == PLACE


def response_turn(client, stream: bool, script: dict, **fields):
    fields = {"model": "m", "extra_body": {"vllm_xargs": script}, **fields}
    if not stream:
        return client.responses.create(**fields)
    with client.responses.stream(**fields) as events:
        return events.get_final_response()


def test_openai_responses(server, openai_client, version, stream):
    items = [{"role": "user", "content": "Read ten files."}]
    fields = {"tools": [{"type": "function", **READ["function"], "strict": False}]}
    *turns, last = scripts(version)
    for turn, (answer, script) in enumerate(zip(ANSWERS, turns)):
        response = response_turn(openai_client, stream, script, input=items, **fields)
        thought, message, call = response.output
        assert (thought.content[0].text, message.content[0].text) == (answer["reasoning"], answer["content"])
        assert response.output_text == answer["content"]
        assert (call.name, json.loads(call.arguments)) == ("read", answer["arguments"])
        items += [item.model_dump(exclude_none=True) for item in response.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": result_of(turn)})
    assert response_turn(openai_client, stream, last, input=items, **fields).output_text == "All read."
    assert_prompt_holds_everything(server.seen()[-1]["prompt"])


# -- anthropic


def test_anthropic(server, key, stream):
    client = anthropic.Anthropic(
        base_url=server.base_url, api_key="none", max_retries=0, timeout=120, default_headers={"X-Request-Id": key}
    )
    messages = [{"role": "user", "content": "Read ten files."}]
    fields = {
        "model": "m",
        "max_tokens": 8000,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "read", "input_schema": READ["function"]["parameters"]}],
    }

    def ask():
        if not stream:
            return client.messages.create(messages=messages, **fields)
        with client.messages.stream(messages=messages, **fields) as events:
            return events.get_final_message()

    for turn, answer in enumerate(ANSWERS):
        message = ask()
        thought, text, call = message.content
        assert message.stop_reason == "tool_use"
        assert (thought.thinking, text.text, call.name, call.input) == (
            answer["reasoning"],
            answer["content"],
            "read",
            answer["arguments"],
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": result_of(turn)}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert [block.type for block in ask().content] == ["thinking", "text"]
    assert_prompt_holds_everything(server.seen(key)[-1]["prompt"])


# -- an agent framework


def test_pydantic_ai(server, key, stream):
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    asked = []

    def read(path: str, line: int) -> str:
        asked.append({"path": path, "line": line})
        return result_of(line)

    async def ignore(_, events):
        async for _ in events:
            pass

    async def run():
        async with openai.AsyncOpenAI(**reaching(server, key)) as client:
            agent = Agent(OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client)), tools=[read])
            return await agent.run("Read ten files.", event_stream_handler=ignore if stream else None)

    result = asyncio.run(run())
    assert result.output == "All read."
    assert asked == [answer["arguments"] for answer in ANSWERS]
    shown = [
        {part.part_kind: part.content for part in message.parts if part.part_kind in ("thinking", "text")}
        for message in result.all_messages()
        if isinstance(message, ModelResponse)
    ]
    said = [{"thinking": answer["reasoning"], "text": answer["content"]} for answer in ANSWERS]
    assert shown == [*said, {"thinking": "Last thought.", "text": "All read."}]
    assert_prompt_holds_everything(server.seen(key)[-1]["prompt"])
