# SPDX-License-Identifier: Apache-2.0
"""Every preset fits its box, or is refused by a known amount."""

import pytest

from vllm.ampere.errors import UsageError
from vllm.ampere.planner.memory import GIB
from vllm.ampere.planner.plan import make_plan
from vllm.ampere.planner.presets import load, names

# GiB that the tightest card lacks; 0 where it fits.
MISSING = {
    "a100-80g-x4-tp4": 3.70,
    "a100-80g-x8-tp8": 0,
    "a100-80g-x8-tp8-ep": 0,
    "a6000-48g-x8-tp4-pp2": 0,
    "a800-40g-x16-tp8-pp2": 0,
    "a800-80g-x8-tp4-pp2": 0,
    "ga100-64g-x6-tp2-pp3": 0,
    "rtx3090-24g-x16-tp8-pp2": 0,
}


def test_every_preset_is_listed():
    assert names() == sorted(MISSING)


@pytest.mark.parametrize("name", names())
def test_preset(table, name):
    preset = load(name)
    plan = make_plan(table, preset.inventory, preset.layout, preset.serving)
    assert preset.layout.cards == preset.inventory.total
    assert plan.missing_bytes / GIB == pytest.approx(MISSING[name], abs=0.005)
    assert bool(plan.refusals) == bool(MISSING[name])
    if not plan.refusals:
        assert plan.concurrency >= 1 and plan.longest_context >= preset.serving.context
        assert plan.warnings == ()


@pytest.mark.parametrize("name", names())
def test_name_says_what_it_is(name):
    preset = load(name)
    words = name.split("-")
    assert f"x{preset.inventory.total}" in words and f"tp{preset.layout.tensor}" in words
    assert ("pp" in name) == (len(preset.layout.partition) > 1)
    size = next(word for word in words if word.endswith("g") and word[:-1].isdigit())
    assert preset.inventory.card_gib == pytest.approx(int(size[:-1]), rel=0.02)


def test_an_unknown_preset():
    with pytest.raises(UsageError, match="there is no preset 'a100-80g-x8-tp'") as raised:
        load("a100-80g-x8-tp")
    assert "did you mean a100-80g-x8-tp8?" in raised.value.hint
