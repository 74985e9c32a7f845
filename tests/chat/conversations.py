# SPDX-License-Identifier: Apache-2.0
"""Conversations whose prompts are fixed to the character, as a table."""

from dataclasses import dataclass, field

from .dialect import INTEGER, STRING, tool

SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Answer in French."}
USER = {"role": "user", "content": "Hello, 世界 🎉"}
AGAIN = {"role": "user", "content": "And then?"}
REASONED = {"role": "assistant", "content": "Hi.", "reasoning": "A greeting."}
PLAIN = {"role": "assistant", "content": "Hi."}
TOOLS = (
    tool("read", path=STRING, lines=INTEGER),
    {"type": "function", "function": {"name": "now", "description": "The time."}},
)


def calls(*arguments: str, **fields) -> dict:
    """An assistant message that calls `read` once for each text of arguments, with the ids c0, c1, ..."""
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": "read", "arguments": a}}
        for i, a in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made, **fields}


def result(number: int, content="text") -> dict:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def parts(role: str, *texts: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


@dataclass(frozen=True)
class Conversation:
    """One conversation.

    Attributes:
        id: of the test.
        messages, tools: as the client sends them.
        fields: more of the request.
        thinks: the model reasons.
        v4_effort, v41_effort: what the request's effort means to each version.
        opens, continues: what happens at the end of the prompt.
    """

    id: str
    messages: tuple
    tools: tuple = ()
    fields: dict = field(default_factory=dict)
    thinks: bool = True
    v4_effort: str = "high"
    v41_effort: int = 75
    opens: bool = True
    continues: bool = False


def _effort(word: str, v4: str, v41: int) -> Conversation:
    """A06: every word of the API has a meaning."""
    return Conversation(f"A06-effort-{word}", (USER,), fields={"reasoning_effort": word}, v4_effort=v4, v41_effort=v41)


OFF = {"chat_template_kwargs": {"thinking": False}}
NOT_OPEN = {"add_generation_prompt": False}
CONTINUE = {"add_generation_prompt": False, "continue_final_message": True}
CONVERSATIONS = (
    Conversation("user", (USER,)),
    Conversation("user-without-thinking", (USER,), fields=OFF, thinks=False),
    Conversation("system-user", (SYSTEM, USER)),
    Conversation("system-user-without-thinking", (SYSTEM, USER), fields=OFF, thinks=False),
    Conversation("A05-system-only", (SYSTEM,)),
    Conversation("system-only-without-thinking", (SYSTEM,), fields=OFF, thinks=False),
    Conversation("two-users", (USER, AGAIN)),
    Conversation("two-systems-in-front", (SYSTEM, {"role": "system", "content": "Be kind."}, USER)),
    Conversation("empty-system", ({"role": "system", "content": ""}, USER)),
    Conversation("parts-of-a-user", (parts("user", "one", "two", ""),)),
    Conversation("parts-of-a-system", (parts("system", "one", "two"), USER)),
    Conversation("A04-developer-user", (DEVELOPER, USER)),
    Conversation("developer-without-thinking", (DEVELOPER, USER), fields=OFF, thinks=False),
    Conversation("developer-in-the-middle", (USER, REASONED, DEVELOPER, AGAIN)),
    Conversation("developer-last", (USER, REASONED, DEVELOPER)),
    Conversation("system-developer-user", (SYSTEM, DEVELOPER, USER)),
    Conversation("developer-with-tools", (DEVELOPER, USER), TOOLS),
    Conversation("history-drops-reasoning", (USER, REASONED, AGAIN)),
    Conversation("history-without-thinking", (USER, REASONED, AGAIN), fields=OFF, thinks=False),
    Conversation("history-keeps-reasoning-with-tools", (USER, REASONED, AGAIN), TOOLS),
    Conversation("history-without-reasoning", (USER, PLAIN, AGAIN)),
    Conversation(
        "A18-system-in-the-middle", (SYSTEM, USER, REASONED, {"role": "system", "content": "Now be kind."}, AGAIN)
    ),
    Conversation("system-in-the-middle-last", (USER, REASONED, {"role": "system", "content": "Now be kind."})),
    Conversation("assistant-first", (PLAIN, USER)),
    Conversation("system-assistant-user", (SYSTEM, PLAIN, USER)),
    Conversation(
        "two-assistants", (USER, PLAIN, {"role": "assistant", "content": "Still here.", "reasoning": "Wait."}, AGAIN)
    ),
    Conversation("A01-assistant-last", (USER, REASONED)),
    Conversation("assistant-last-without-thinking", (USER, REASONED), fields=OFF, thinks=False),
    Conversation("A02-continue", (USER, REASONED), fields=CONTINUE, opens=False, continues=True),
    Conversation("continue-without-reasoning", (USER, PLAIN), fields=CONTINUE, opens=False, continues=True),
    Conversation(
        "continue-without-thinking",
        (USER, PLAIN),
        fields={**CONTINUE, **OFF},
        thinks=False,
        opens=False,
        continues=True,
    ),
    Conversation(
        "continue-the-reasoning",
        (USER, {"role": "assistant", "content": "", "reasoning": "First,"}),
        fields=CONTINUE,
        opens=False,
        continues=True,
    ),
    Conversation("continue-with-tools", (USER, PLAIN, AGAIN, REASONED), TOOLS, CONTINUE, opens=False, continues=True),
    Conversation("A03-not-opened", (USER,), fields=NOT_OPEN, opens=False),
    Conversation("not-opened-behind-an-assistant", (USER, REASONED), fields=NOT_OPEN, opens=False),
    Conversation("not-opened-behind-a-system", (SYSTEM,), fields=NOT_OPEN, opens=False),
    Conversation("tools", (USER,), TOOLS),
    Conversation("tools-and-system", (SYSTEM, USER), TOOLS),
    Conversation("tools-without-thinking", (USER,), TOOLS, OFF, thinks=False),
    Conversation("tools-and-a-later-system", (USER, PLAIN, SYSTEM, AGAIN), TOOLS),
    Conversation("A16-tool-as-sent", (USER,), ({"type": "function", "function": {"name": "f"}},)),
    Conversation(
        "tool-with-nulls-of-its-own",
        (USER,),
        (
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {"type": "object", "properties": {"a": {"default": None, "enum": ["x", None]}}},
                },
            },
        ),
    ),
    Conversation("A17-call-and-result", (USER, calls('{"path": "a b"}', reasoning="Look."), result(0)), TOOLS),
    Conversation(
        "call-with-content", (USER, calls('{"path": "a", "lines": 3}', content="Reading."), result(0), AGAIN), TOOLS
    ),
    Conversation("call-without-arguments", (USER, calls("{}"), result(0)), TOOLS),
    Conversation(
        "values-of-every-type",
        (USER, calls('{"s": "1", "i": 1, "f": 1.5, "t": true, "z": null, "l": [1, "x"], "o": {"k": "é"}}'), result(0)),
        TOOLS,
    ),
    Conversation(
        "arguments-to-the-letter", (USER, calls('{"path": " <b> \\"q\\" \\n\\t</b> 世界"}'), result(0)), TOOLS
    ),
    Conversation(
        "two-calls-two-results", (USER, calls('{"path": "a"}', '{"path": "b"}'), result(0, "A"), result(1, "B")), TOOLS
    ),
    Conversation(
        "A15-results-in-reverse",
        (USER, calls('{"path": "a"}', '{"path": "b"}'), result(1, "B"), result(0, "A")),
        TOOLS,
    ),
    Conversation("result-and-user", (USER, calls('{"path": "a"}'), result(0, "A"), AGAIN), TOOLS),
    Conversation(
        "parts-of-a-result",
        (USER, calls('{"path": "a"}'), {**parts("tool", "one", "two"), "tool_call_id": "c0"}),
        TOOLS,
    ),
    Conversation("empty-result", (USER, calls('{"path": "a"}'), result(0, "")), TOOLS),
    Conversation(
        "two-rounds",
        (
            USER,
            calls('{"path": "a"}', reasoning="R1"),
            result(0, "A"),
            calls('{"path": "b"}', reasoning="R2"),
            result(0, "B"),
        ),
        TOOLS,
    ),
    Conversation("X13-rounds-without-tools", (USER, calls('{"path": "a"}', reasoning="R1"), result(0, "A"))),
    Conversation(
        "calls-without-thinking",
        (USER, calls('{"path": "a"}', reasoning="R1"), result(0, "A")),
        TOOLS,
        OFF,
        thinks=False,
    ),
    _effort("minimal", "low", 50),
    _effort("low", "low", 50),
    _effort("medium", "low", 75),
    _effort("high", "high", 75),
    _effort("xhigh", "high", 75),
    _effort("max", "max", 100),
    Conversation("A09-effort-none", (USER,), fields={"reasoning_effort": "none"}, thinks=False),
    Conversation(
        "max-effort-with-a-system-and-tools",
        (SYSTEM, USER),
        TOOLS,
        {"reasoning_effort": "max"},
        v4_effort="max",
        v41_effort=100,
    ),
)
