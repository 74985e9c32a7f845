# SPDX-License-Identifier: Apache-2.0
"""The answer decoder alone: generated answers and markup in any order, cut anywhere."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ampere.integration.chat.arguments import PayloadReader
from vllm.ampere.integration.chat.decoder import AnswerDecoder

from .dialect import spell
from .driver import MODES, Answer
from .generated import answers, soups

SCHEMA = {"a": {"type": "string"}, "n": {"type": "integer"}, "k": {}}


def read(pieces, **options) -> tuple[Answer, bool]:
    """The answer in these pieces, and whether its last call was left open."""
    decoder = AnswerDecoder(
        reasoning=True, properties=lambda name: SCHEMA, dropped=("<｜end▁of▁sentence｜>",), **options
    )
    answer = Answer()
    for piece in (*map(decoder.feed, pieces), decoder.finish()):
        answer.reasoning += piece.reasoning
        answer.content += piece.content
        answer.add(
            {
                "tool_calls": [
                    {"index": call.index, "function": {"name": call.name, "arguments": call.arguments}}
                    for call in piece.calls
                ]
            }
        )
    return answer, decoder.call_is_open


def pieces_of(text: str, cuts) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends)]


@pytest.mark.parametrize("version", MODES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_an_answer_is_what_was_written(version, data):
    made = data.draw(answers)
    answer, open_call = read([made.written(version)])
    assert (answer.reasoning, answer.content, answer.calls, open_call) == (
        made.reasoning,
        made.content,
        made.arguments_texts,
        False,
    )


@settings(max_examples=300, deadline=None)
@given(text=soups, cuts=st.lists(st.integers(0, 300), max_size=6), keep=st.booleans())
def test_cuts_change_nothing(text, cuts, keep):
    whole = read([text], keep_after_calls=keep)
    assert read(pieces_of(text, cuts), keep_after_calls=keep) == whole
    assert read(text, keep_after_calls=keep) == whole


def is_prefix_of_json_object(text: str) -> bool:
    """Whether some text behind `text` makes it a JSON object: what is open in it is closed."""
    tails = ("", '"', "0", '"": 0', ": 0", '": 0', "\\\\")
    openings, in_string, escaped = [], False, False
    for character in text:
        if escaped:
            escaped = False
        elif in_string:
            escaped = character == "\\"
            in_string = character != '"'
        elif character == '"':
            in_string = True
        elif character in "{[":
            openings.append("}" if character == "{" else "]")
        elif character in "}]":
            openings.pop()
    ends = "".join(reversed(openings))
    return any(_is_object(text + tail + ends) for tail in tails)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@settings(max_examples=300, deadline=None)
@given(text=soups, end=st.integers(0, 300))
def test_arguments_are_json_so_far_and_whole_only_if_the_call_is_closed(text, end):
    """At every character of an answer, and of an answer that is cut anywhere."""
    cut = "t</think>" + text[:end]
    decoder, so_far = AnswerDecoder(reasoning=True, properties=lambda name: SCHEMA), {}
    for piece in (*map(decoder.feed, cut), decoder.finish()):
        for call in piece.calls:
            so_far[call.index] = so_far.get(call.index, "") + call.arguments
            assert not so_far[call.index] or is_prefix_of_json_object(so_far[call.index])
    if decoder.call_is_open:
        assert so_far[decoder.calls - 1].startswith("{") and not _is_object(so_far[decoder.calls - 1])
    elif so_far:
        assert _is_object(so_far[decoder.calls - 1])


@pytest.mark.parametrize("version", MODES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_cut_call_is_never_whole(version, data):
    """Cut a good answer at any place inside its last call: what is handed over does not parse."""
    made = data.draw(answers.filter(lambda made: made.calls))
    written = made.written(version)
    last = written.rindex(spell(version, f"«{made.calls[-1][0]}»"))
    end = written.rindex(spell(version, f"«/{made.calls[-1][0]}»"))
    cut = data.draw(st.integers(last, end))
    answer, open_call = read([written[:cut]])
    assert answer.calls[: len(made.calls) - 1] == made.arguments_texts[:-1]
    if len(answer.calls) == len(made.calls):
        assert open_call and not _is_object(answer.calls[-1][1])


LONG = {
    "words": "word " * 40_000,
    "escapes": '"\\\n' * 66_000,
    "angle brackets": "<" * 200_000,
    "begun closers": "</｜DSML｜ inv" * 16_000,
    "closers of calls": "</｜DSML｜ invoke>\n" * 11_500,
}


def timed(text: str) -> tuple[float, str]:
    """CPU seconds to read `text` in pieces of four characters, and the arguments in it."""
    decoder, arguments = AnswerDecoder(reasoning=True), []
    start = time.process_time()
    for at in range(0, len(text), 4):
        arguments += [call.arguments for call in decoder.feed(text[at : at + 4]).calls]
    arguments += [call.arguments for call in decoder.finish().calls]
    return time.process_time() - start, "".join(arguments)


@pytest.mark.parametrize("string", ("=", ":"))
@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_200_kb_of_argument_take_less_than_a_second(value, string):
    """CPU seconds, in pieces of about a token: far from the limit unless time grows with the square."""
    seconds, arguments = timed(spell("v41", f"t</think>«calls»\n«f»\n«a{string}»{value}«/»\n«/f»\n«/calls»"))
    assert json.loads(arguments) == {"a": value}
    assert seconds < 1.0


HOSTILE = {
    "blanks": " " * 200_000,
    "blank lines in content": "t</think>a" + "\n" * 200_000,
    "tags of HTML": "t</think>" + "<b>" * 67_000,
    "blanks in a call": spell("v41", "t</think>«f»") + " " * 200_000,
    "a call of JSON without end": spell("v41", "t</think>«f»{") + "x" * 200_000,
    "invokes without end": '<｜DSML｜ invoke name="' * 9_000,
    "mentions": spell("v41", "t</think>" + "«calls» x " * 15_000),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_200_kb_of_anything_take_less_than_two_seconds(text):
    """CPU seconds, in pieces of four characters."""
    assert timed(text)[0] < 2.0


@settings(max_examples=200, deadline=None)
@given(payload=st.text(), cuts=st.lists(st.integers(0, 200), max_size=8), ascii_only=st.booleans())
def test_the_payload_of_a_custom_tool(payload, cuts, ascii_only):
    text = json.dumps({"input": payload}, ensure_ascii=ascii_only)
    reader = PayloadReader()
    assert "".join(map(reader.read, pieces_of(text, cuts))) == payload
    reader = PayloadReader()
    assert "".join(map(reader.read, text)) == payload


def test_other_arguments_have_no_payload():
    reader = PayloadReader()
    assert "".join(map(reader.read, '{"other": "x", "input": "y"}')) == ""


def test_200_kb_of_payload_take_less_than_a_second():
    text = json.dumps({"input": 'word "\\\n' * 20_000})
    reader, start = PayloadReader(), time.process_time()
    read = [reader.read(text[at : at + 4]) for at in range(0, len(text), 4)]
    assert time.process_time() - start < 1.0
    assert "".join(read) == json.loads(text)["input"]
