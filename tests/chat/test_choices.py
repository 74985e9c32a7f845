# SPDX-License-Identifier: Apache-2.0
"""The open points of the format: each value of each does what the table says, and another is refused."""

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatMessage
from vllm.parser.parser_manager import ParserManager

from vllm.ampere.errors import SelectionError
from vllm.ampere.integration.chat.choices import CHOICES, chosen

from .answers import ONE
from .dialect import TOOLS, spell
from .driver import MODES, USER
from .test_parser import ASSISTANT, EOS, THINK


@pytest.fixture
def choose(monkeypatch):
    return lambda text: monkeypatch.setenv("VLLM_AMPERE_CHAT", text)


def parser_of(version, tokenizers):
    cls = ParserManager.get_parser(MODES[version], MODES[version], True)
    return cls(tokenizers[version], None, chat_template_kwargs={})


def parsed(version, tokenizers, answer: str, **fields) -> tuple:
    """Reasoning, content and number of calls, the same whole and streamed; the answer has ended by itself."""
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [USER], "tools": list(TOOLS), **fields})
    text = spell(version, answer)
    whole = parser_of(version, tokenizers)
    whole.set_prompt_token_ids([ASSISTANT, THINK])
    reasoning, content, calls = whole.parse(text, request, True, [5, EOS])
    streaming, pieces = parser_of(version, tokenizers), {"reasoning": "", "content": ""}
    for number, character in enumerate([*text, ""]):
        ids = [5] if number < len(text) else [EOS]
        delta = streaming.parse_delta(
            character, ids, request, None if number else [ASSISTANT, THINK], finished=number == len(text)
        )
        for name in pieces:
            pieces[name] += getattr(delta, name, None) or ""
    assert pieces == {"reasoning": reasoning or "", "content": content or ""}
    return reasoning, content, len(calls)


def prompt(version, tokenizers, **kwargs) -> str:
    return tokenizers[version].apply_chat_template([USER], tokenize=False, **kwargs)


def test_every_point_has_a_default_and_another_value():
    assert all(len(choice.values) == 2 and chosen(name) == choice.values[0] for name, choice in CHOICES.items())


@pytest.mark.parametrize(
    "text, message",
    (("nonsense=1", "names 'nonsense'"), ("v4_medium=huge", "to 'huge'"), ("v4_medium", "has 'v4_medium'")),
)
def test_another_name_or_value_is_refused(choose, text, message):
    choose(text)
    with pytest.raises(SelectionError, match=message) as error:
        chosen("v4_medium")
    assert error.value.hint


def test_a_server_with_a_bad_choice_does_not_start(choose, capsys):
    choose("v4_medium=huge")
    with pytest.raises(SystemExit):
        ParserManager.get_parser("deepseek_v4", "deepseek_v4", True)
    assert capsys.readouterr().err.startswith("error: VLLM_AMPERE_CHAT sets v4_medium to 'huge'\nhint: ")


def test_v41_effort(choose, tokenizers):
    budgets = {"low": (50, 25), "medium": (75, 50), "high": (75, 50), "xhigh": (75, 75), "max": (100, 100)}
    for place, value in enumerate(("low50", "low25")):
        choose(f"v41_effort={value}")
        for word, budget in budgets.items():
            assert f"Reasoning Effort: {budget[place]} " in prompt("v41", tokenizers, reasoning_effort=word)


def test_v4_medium(choose, tokenizers):
    words = {value: prompt("v4", tokenizers, reasoning_effort=value) for value in ("low", "high")}
    assert words["low"] != words["high"]
    for value in ("low", "high"):
        choose(f"v4_medium={value}")
        assert prompt("v4", tokenizers, reasoning_effort="medium") == words[value]


def test_unclosed_reasoning(choose, version, tokenizers):
    assert parsed(version, tokenizers, "thought") == ("thought", None, 0)
    choose("unclosed_reasoning=content")
    assert parsed(version, tokenizers, "thought") == (None, "thought", 0)
    assert parsed(version, tokenizers, "thought</think>words") == ("thought", "words", 0)


def test_after_calls(choose, version, tokenizers):
    assert parsed(version, tokenizers, f"t</think>{ONE}\n\nDone.") == ("t", None, 1)
    choose("after_calls=keep")
    assert parsed(version, tokenizers, f"t</think>{ONE}\n\nDone.") == ("t", "Done.", 1)


def test_forbidden_calls(choose, version, tokenizers):
    assert parsed(version, tokenizers, f"t</think>{ONE}", tool_choice="none") == ("t", None, 0)
    choose("forbidden_calls=text")
    assert parsed(version, tokenizers, f"t</think>{ONE}", tool_choice="none") == ("t", spell(version, ONE), 0)


def test_reasoning_field(choose, version, tokenizers):
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [USER]})
    message = ChatMessage(role="assistant", reasoning="t")
    assert "reasoning_content" not in parser_of(version, tokenizers).name_reasoning(message).model_dump()
    choose("reasoning_field=both")
    parser = parser_of(version, tokenizers)
    assert parser.name_reasoning(message).model_dump()["reasoning_content"] == "t"
    delta = parser.parse_delta("t", [5], request, [ASSISTANT, THINK], finished=False).model_dump(exclude_unset=True)
    assert (delta["reasoning"], delta["reasoning_content"]) == ("t", "t")


def test_defaults_of_the_server_give_way(version, tokenizers):
    """A08: the request's own switch wins over a server default of another name, and an effort word over both."""

    def asked(defaults, **fields):
        request = ChatCompletionRequest.model_validate({"model": "m", "messages": [USER], **fields})
        return request.build_chat_params(None, "auto").with_defaults(defaults).chat_template_kwargs

    for defaults, fields, thinks in (
        ({"thinking": True}, {"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"enable_thinking": True}, {"chat_template_kwargs": {"thinking": False}}, False),
        ({"thinking": False}, {"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"thinking": True}}, True),
        ({"thinking": False}, {"reasoning_effort": "high"}, True),
        ({"thinking": True}, {"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"thinking": True}}, True),
        ({"thinking": False}, {"thinking": {"type": "enabled"}}, True),
        ({"thinking": False}, {}, False),
        ({"reasoning_effort": "none"}, {}, False),
        ({"reasoning_effort": "max", "thinking": True}, {"chat_template_kwargs": {"thinking": False}}, False),
    ):
        text = prompt(version, tokenizers, **asked(defaults, **fields))
        assert text.endswith("<think>" if thinks else "</think>"), (defaults, fields)
