# SPDX-License-Identifier: Apache-2.0
"""Conversations as the prompt encoders of DeepSeek V4 and V4.1 take them, checked before anything is written.

The encoders are vLLM's copies of the release's. They assume messages without mistakes; here a client's mistake is a
ValueError, which the server answers with 400 and the sentence.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from . import literal, switches
from .choices import chosen
from .markup import END_THINK

ROLES = ("system", "developer", "user", "assistant", "tool")
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
IMAGE = "<｜deepseek_image｜>"
_TEXT_PARTS = ("text", "input_text", "output_text")
# Roles that the format writes into a user turn, and the fields of a message beside its content that reach the prompt.
_USER_TURN = ("developer", "user", "tool")
_CLIENT_FIELDS = ("reasoning", "reasoning_content", "tool_calls", "tools", "response_format")
_IMAGE_PARTS = ("image_url", "input_image", "image_pil")


def encode_v4(
    tokenizer, encode: Callable[..., str], messages: Sequence[Mapping], tools: Sequence[Mapping] | None, kwargs: Mapping
) -> str | list[int]:
    """The prompt of V4: token ids, or text if the argument `tokenize` is false and the text reads back as it should.

    Args:
        tokenizer: the model's.
        encode: `encode_messages` of V4.
        messages: the conversation as the client sent it.
        tools: of the request.
        kwargs: the template arguments.

    Raises:
        ValueError: a mistake in the conversation or in the arguments, or a text that spells the image token.
    """
    return _shallow(_encode, tokenizer, encode, messages, tools, kwargs, reasoning_effort=switches.v4_effort(kwargs))


def encode_v41(
    tokenizer,
    encode: Callable[..., str],
    messages: Sequence[Mapping],
    tools: Sequence[Mapping] | None,
    image_order: list[int] | None,
    kwargs: Mapping,
) -> str | list[int]:
    """The prompt of V4.1, as `encode_v4` gives it.

    Args:
        image_order: receives the number of each image that the prompt shows, in its order.
        tokenizer, encode, messages, tools, kwargs: as `encode_v4`.

    Raises:
        ValueError: as `encode_v4`.
    """
    effort = switches.v41_effort(kwargs)
    return _shallow(
        _encode, tokenizer, encode, messages, tools, kwargs, reasoning_effort=effort, image_order=image_order
    )


def arguments_object(arguments) -> dict:
    """A call's arguments in the history as an object, whatever the client sent; nothing of it is lost.

    Text that encodes an object twice is decoded twice. What is no object becomes the one argument "arguments", which
    V4.1's own encoder does too: a broken call in the history must not end the conversation.
    """
    value = arguments
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                break
    if value is None or value == "":
        return {}
    return value if isinstance(value, dict) else {"arguments": arguments}


def _shallow(function: Callable, *args, **kwargs):
    try:
        return function(*args, **kwargs)
    except RecursionError:
        raise ValueError("a message or a tool is nested too deeply") from None


def _encode(tokenizer, encode, messages: Sequence[Mapping], tools, kwargs: Mapping, **options) -> str | list[int]:
    if not messages:
        raise ValueError("messages is empty; send at least one message")
    conversation, images = [], 0
    for message in messages:
        conversation.append(_flattened(_checked(message), images))
        images += len(conversation[-1]["_image_indices"])
    if tools:
        _check_tools(tools)
        _refuse_image_token(tools, "a tool")
        system = next((m for m in conversation if m["role"] == "system"), None)
        if system is None:
            system = {"role": "system", "content": ""}
            conversation.insert(0, system)
        system["tools"] = [*(system.get("tools") or ()), *_written(tools)]
    thinking = switches.is_thinking(kwargs)
    last = conversation[-1]
    continues = bool(kwargs.get("continue_final_message")) or bool(last.get("prefix"))
    if continues:
        if last["role"] != "assistant":
            raise ValueError(
                f"continue_final_message continues an assistant message; the last one's role is {last['role']}"
            )
        last["wo_eos"] = True
    drop_thinking = kwargs.get("drop_thinking", True)
    if not isinstance(drop_thinking, bool):
        raise ValueError(f"drop_thinking must be true or false; got {drop_thinking!r}")
    prompt = encode(
        conversation,
        thinking_mode="thinking" if thinking else "chat",
        drop_thinking=drop_thinking,
        add_generation_prompt=not continues and bool(kwargs.get("add_generation_prompt", True)),
        **options,
    )
    if continues and thinking and _reasoning(last) and not last.get("content") and not last.get("tool_calls"):
        prompt = prompt.removesuffix(END_THINK)  # what is to be continued is the reasoning
    if literal.is_marked(prompt) or kwargs.get("tokenize", True):
        return literal.tokens(lambda text: tokenizer.encode(text, add_special_tokens=False), prompt)
    return prompt


def _written(value):
    """Client text or JSON as the prompt shows it."""
    return literal.mark(value) if chosen("control_text") == "literal" else value


def _reasoning(message: Mapping) -> str | None:
    return message.get("reasoning") or message.get("reasoning_content")


def _checked(message: Mapping) -> dict:
    """A copy with the fields that the encoders know, each of its type."""
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"a message has the role {role!r}; DeepSeek takes {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, Iterable) and not isinstance(content, (str, Mapping)):
        content = list(content)  # pydantic leaves an iterator where the type says Iterable
    checked = {"role": role, "content": "" if content is None else content}
    if not isinstance(checked["content"], (str, list)):
        raise ValueError(f"the content of a {role} message must be text or a list of parts")
    if role == "user" and checked["content"] == []:
        raise ValueError("a user message has an empty list of parts as its content")
    if reasoning := _reasoning(message):
        checked["reasoning"] = checked["reasoning_content"] = reasoning
    if role == "assistant" and message.get("prefix"):
        checked["prefix"] = True  # DeepSeek's own name for an answer to be continued
    if role == "assistant" and message.get("tool_calls"):
        checked["tool_calls"] = [_checked_call(call) for call in message["tool_calls"]]
    if role == "tool":
        checked["tool_call_id"] = message.get("tool_call_id") or ""
    if message.get("task") is not None:
        if message["task"] not in TASKS:
            raise ValueError(f"a message has the task {message['task']!r}; there are {', '.join(TASKS)}")
        checked["task"] = message["task"]
    if message.get("tools"):
        _check_tools(message["tools"])
        checked["tools"] = message["tools"]
    if message.get("response_format"):
        checked["response_format"] = message["response_format"]
    return checked


def _checked_call(call) -> dict:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('an entry of tool_calls is not {"id": ..., "function": {"name": ..., "arguments": ...}}')
    arguments = arguments_object(function.get("arguments"))
    return {"id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}


def _check_tools(tools) -> None:
    for tool in tools if isinstance(tools, (list, tuple)) else [None]:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError('an entry of tools is not {"type": "function", "function": {"name": ...}}')


def _flattened(message: dict, images: int) -> dict:
    """A message with its content as one text, an image as its token.

    Args:
        message: checked.
        images: number of images in the messages before.
    """
    parts = (
        message["content"] if isinstance(message["content"], list) else [{"type": "text", "text": message["content"]}]
    )
    texts, indices = [], []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS:
            texts.append(IMAGE)
            indices.append(images + len(indices))
        elif kind in _TEXT_PARTS:
            text = part.get("text") or ""
            _refuse_image_token(text, f"the text of a {message['role']} message")
            texts.append(_written(text))
        else:
            raise ValueError(f"DeepSeek takes text and images; a content part is of type {kind!r}")
    text = "\n\n".join(texts)
    if message["role"] == "developer" and not text:
        raise ValueError("a developer message has no content")
    _refuse_image_token(message.get("reasoning"), "the reasoning of an assistant message")
    _refuse_image_token(message.get("tool_calls"), "a tool call")
    _refuse_image_token(message.get("tools"), "a tool")
    _refuse_image_token(message.get("response_format"), "a response format")
    if message["role"] in _USER_TURN and chosen("control_text") == "literal":
        text = literal.escape_results(text)
    marked = {name: _written(message[name]) for name in _CLIENT_FIELDS if name in message}
    return {**message, **marked, "content": text, "_image_indices": indices}


def _refuse_image_token(value, where: str) -> None:
    """Refuse text that the tokenizer would read as an image."""
    if isinstance(value, str) and IMAGE in value:
        raise ValueError(f"{where} contains the image token {IMAGE}; send images as content parts")
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_image_token(inner, where)
