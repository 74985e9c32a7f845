# SPDX-License-Identifier: Apache-2.0
"""docs/en/api.md and its Chinese twin: every pasted request is answered, and the tables are what the code does."""

import contextlib
import io
import re
import shlex
import urllib.request
from pathlib import Path

import pytest

from .dialect import spell
from .driver import USER

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ((ROOT / "docs" / language / "api.md").read_text(encoding="utf-8") for language in ("en", "zh"))
BLOCKS = re.findall(r"```(?:sh|python)\n(.*?)```", ENGLISH, re.DOTALL)
CALL = "«calls»\n«weather»\n«city=»Zürich«/»\n«/weather»\n«/calls»"
# For each block: what the model says, the end of the prompt that asks it, and a piece of the answer as it is sent.
EXPECTED = (
    ("t</think>A card.", "Be brief.<｜User｜>What is an A100?<｜Assistant｜><think>", '"content":"A card."'),
    ("t</think>391", "What is 17 * 23?<｜Assistant｜><think>", '"reasoning":"t"'),
    ("391", "What is 17 * 23?<｜Assistant｜></think>", '"content":"391"'),
    (
        "I need the weather.</think>" + CALL,
        "<｜User｜>How warm is it in Zürich?<｜Assistant｜><think>",
        r'"arguments":"{\"city\": \"Zürich\"}"',
    ),
    ("t</think>21.", "<tool_result>21 degrees</tool_result><｜Assistant｜><think>", '"content":"21."'),
    (
        't</think>{"name": "Zürich", "people": 450000}',
        "population.<｜Assistant｜><think>",
        r'"content":"{\"name\": \"Zürich\"',
    ),
    (" three, four, five.", "</think>One, two,", '"content":" three, four, five."'),
    ("t</think>A card.", "Be brief.<｜User｜>What is an A100?<｜Assistant｜><think>", '"text":"A card."'),
    ("t</think>A card.", "Be brief.<｜User｜>What is an A100?<｜Assistant｜><think>", '"thinking":"t"'),
    ("t</think>A card.", "<｜User｜>What is an A100?<｜Assistant｜><think>", "t\nA card.\n"),
)


def run(block: str, base_url: str) -> str:
    """What the block prints: a curl command as curl would send it, or Python."""
    block = block.replace("http://localhost:8000", base_url)
    if not block.startswith("curl "):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(block, {})
        return printed.getvalue()
    _, url, header_flag, header, data_flag, data = shlex.split(block)
    assert (header_flag, header, data_flag) == ("-H", "Content-Type: application/json", "-d")
    with urllib.request.urlopen(
        urllib.request.Request(url, data.encode(), {"Content-Type": "application/json"}), timeout=120
    ) as answer:
        return answer.read().decode()


@pytest.mark.vllm
@pytest.mark.parametrize("number", range(len(EXPECTED)))
def test_a_pasted_request_is_answered(server, version, number):
    said, prompt, printed = EXPECTED[number]
    server.queue("", [{"script": spell(version, said)}])
    assert printed in run(BLOCKS[number], server.base_url)
    assert server.seen()[-1]["prompt"].endswith(prompt)


def test_every_block_is_expected_and_the_twin_has_the_same():
    assert len(BLOCKS) == len(EXPECTED)
    assert re.findall(r"```\w*\n.*?```", CHINESE, re.DOTALL) == re.findall(r"```\w*\n.*?```", ENGLISH, re.DOTALL)
    assert re.findall("^## ", CHINESE, re.MULTILINE) == re.findall("^## ", ENGLISH, re.MULTILINE)


def rows(text: str, heads) -> list[list[str]]:
    """Table rows that begin with one of `heads`, in cells."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    return [row for row in cells if row[0].startswith(tuple(heads))]


@pytest.mark.vllm
@pytest.mark.parametrize("text", (ENGLISH, CHINESE), ids=("en", "zh"))
def test_the_tables_are_what_the_code_does(tokenizers, text):
    from vllm.ampere.integration.chat.choices import CHOICES

    points = rows(text, [f"`{name}`" for name in CHOICES])
    assert {row[0].strip("`"): tuple(re.findall("`(.*?)`", row[1])) for row in points} == {
        name: choice.values for name, choice in CHOICES.items()
    }
    (words,) = rows(text, ("word", "词"))
    (budgets,) = rows(text, ("V4.1,", "V4.1，"))
    (v4,) = rows(text, ("V4,", "V4，"))
    for word, budget, v4_word in list(zip(words, budgets, v4))[2:]:
        kwargs = {"reasoning_effort": word.strip("`")} if word.startswith("`") else {}
        prompts = {
            version: tokenizers[version].apply_chat_template([USER], tokenize=False, **kwargs) for version in tokenizers
        }
        if word == "`none`":
            assert budget == v4_word and all(prompt.endswith("</think>") for prompt in prompts.values())
            continue
        assert f"Reasoning Effort: {budget} " in prompts["v41"]
        assert prompts["v4"] == tokenizers["v4"].apply_chat_template([USER], tokenize=False, reasoning_effort=v4_word)
