# SPDX-License-Identifier: Apache-2.0
"""The prompt format of DeepSeek V4 and V4.1, written a second time from its rules, for conversations without mistakes.

Nothing here imports the server's encoders. The rules:

    1.  The prompt begins with BOS. V4.1 then has the system token, if the model reasons or a system message leads.
    2.  If the model reasons, an effort text comes next: a number in V4.1, a paragraph or nothing in V4.
    3.  Tools are written into the first system message, behind its text; without one, an empty one is put in front.
    4.  A system message further on stands in its place: behind the system token in V4.1, bare in V4.
    5.  A developer message is a user turn of its own. User and tool messages in a row are one user turn, their texts
        joined by a blank line; a tool's is <tool_result>...</tool_result>, in the order of the calls.
    6.  Parts of a content are joined by a blank line.
    7.  An assistant turn opens with the assistant token and <think> or </think>, and closes with EOS. Its reasoning is
        shown, between the two tags, if the model reasons and the turn is behind the last user turn or there are tools.
        In V4.1 a later system message counts as a user turn and tool results alone do not; in V4 it is the other way.
    8.  Calls stand behind the content and a blank line.
    9.  At the end an assistant turn opens. A turn that is to be continued has no EOS instead.
"""

import json
from collections.abc import Mapping, Sequence

from .dialect import spell

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
V41_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
V4_EFFORTS = {
    "low": "",
    "high": (
        "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
        "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root "
        "cause, rigorously stress-testing your logic against all potential paths, edge cases, and adversarial "
        "scenarios.\n"
        "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
        "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
    ),
    "max": (
        "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
        "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively "
        "decompose the problem into its most fundamental components, trace every causal chain to its root, and "
        "resolve the underlying cause rather than any surface symptom.\n"
        "Do not stop reasoning until you have independently verified the solution from multiple angles and are "
        "certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
    ),
}
TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "«calls»" block like the following:

«calls»
«$TOOL_NAME»
{parameter}$PARAMETER_VALUE«/»
...
«/$TOOL_NAME»
«$TOOL_NAME2»
...
«/$TOOL_NAME2»
«/calls»

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


def render(
    version: str,
    messages: Sequence[Mapping],
    tools: Sequence[Mapping] = (),
    *,
    thinks: bool = True,
    effort: str | int = "high",
    opens: bool = True,
    continues: bool = False,
) -> str:
    """The prompt of a conversation.

    Args:
        version: "v4" or "v41".
        messages: as a client sends them to the chat endpoint.
        tools: of the request.
        thinks: the model reasons.
        effort: V4's word (low, high, max) or V4.1's number.
        opens: an assistant turn opens at the end.
        continues: the last message, the assistant's, is continued.
    """
    turns = _turns(messages)
    if tools and not any(kind == "system" for kind, _ in turns):
        turns.insert(0, ("system", [{"content": ""}]))
    last_user = max((i for i, turn in enumerate(turns) if _is_user_turn(version, i, turn)), default=-1)
    prompt = BOS
    if version == "v41" and (thinks or turns[0][0] == "system"):
        prompt += SYSTEM
    if thinks:
        prompt += V41_EFFORT.format(effort) if version == "v41" else V4_EFFORTS[effort]
    for index, (kind, turn) in enumerate(turns):
        keeps = thinks and (bool(tools) or index > last_user)
        if kind == "system":
            prompt += SYSTEM if version == "v41" and index else ""
            prompt += _text(turn[0]["content"])
            if tools and all(other != "system" for other, _ in turns[:index]):
                prompt += "\n\n" + _tools(version, tools)
        elif kind == "user":
            prompt += USER + "\n\n".join(_part(message) for message in _in_call_order(turns, index))
        else:
            prompt += ASSISTANT + "<think>" * keeps + _assistant(version, turn[0], keeps)
            if continues and index == len(turns) - 1:
                open_reasoning = keeps and turn[0].get("reasoning") and not turn[0].get("content")
                return prompt.removesuffix("</think>") if open_reasoning else prompt
            prompt += EOS
    return prompt + (ASSISTANT + ("<think>" if thinks else "</think>") if opens else "")


def _turns(messages) -> list[tuple[str, list[Mapping]]]:
    turns = []
    for message in messages:
        role = message["role"]
        if role in ("user", "tool") and turns and turns[-1][0] == "user" and turns[-1][1][0]["role"] != "developer":
            turns[-1][1].append(message)
        else:
            turns.append(({"tool": "user", "developer": "user"}.get(role, role), [message]))
    return turns


def _is_user_turn(version: str, index: int, turn) -> bool:
    kind, messages = turn
    if version == "v4":
        return kind == "user"
    return (kind == "system" and index > 0) or (kind == "user" and any(m["role"] != "tool" for m in messages))


def _in_call_order(turns, index: int) -> list[Mapping]:
    """The messages of a user turn, the tool results among them in the order of the last calls."""
    calls = next(
        (
            turn[0]["tool_calls"]
            for kind, turn in reversed(turns[:index])
            if kind == "assistant" and turn[0].get("tool_calls")
        ),
        (),
    )
    order = {call["id"]: place for place, call in enumerate(calls)}
    results = iter(
        sorted((m for m in turns[index][1] if m["role"] == "tool"), key=lambda m: order.get(m["tool_call_id"], 0))
    )
    return [next(results) if message["role"] == "tool" else message for message in turns[index][1]]


def _part(message: Mapping) -> str:
    text = _text(message["content"])
    return f"<tool_result>{text}</tool_result>" if message["role"] == "tool" else text


def _text(content) -> str:
    return content or "" if not isinstance(content, list) else "\n\n".join(part["text"] for part in content)


def _assistant(version: str, message: Mapping, keeps: bool) -> str:
    text = (message.get("reasoning") or "") * keeps + "</think>" + _text(message.get("content"))
    if not message.get("tool_calls"):
        return text
    calls = []
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        lines = [
            spell(version, f"«{key}=»") + value + spell(version, "«/»")
            if isinstance(value, str)
            else spell(version, f"«{key}:»") + json.dumps(value, ensure_ascii=False) + spell(version, "«/»")
            for key, value in arguments.items()
        ]
        calls.append("\n".join([spell(version, f"«{name}»"), "\n".join(lines), spell(version, f"«/{name}»")]))
    return text + "\n\n" + spell(version, "«calls»\n") + "\n".join(calls) + spell(version, "\n«/calls»")


def _tools(version: str, tools) -> str:
    parameter = spell(version, "«$PARAMETER_NAME=»").replace('"true"', '"true|false"')
    schemas = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    head, tail = spell(version, TOOLS.replace("{parameter}", parameter)).split("{schemas}")
    return head + schemas + tail
