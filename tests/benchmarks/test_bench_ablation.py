# SPDX-License-Identifier: Apache-2.0
"""Figures of the ablation from rounds with known times, and that every switch it throws exists."""

import pytest

from benchmarks.bench_ablation import FAMILIES, figures
from vllm.ampere.kernels.registry import all_ops


def seen(step_ms, prefill_ms):
    return {"steps_s": [step_ms / 1e3, step_ms / 1e3, 1.0], "prefill_s": prefill_ms / 1e3}


def test_ratios_are_taken_within_a_round():
    rounds = [{"ours": seen(o, 100), "upstream": seen(u, 50)} for o, u in ((10, 20), (20, 30), (10, 40))]
    listed = figures("mhc", {"bs1-ctx256": rounds})
    found = {figure["id"].removeprefix("ablation_tp8/mhc/"): figure for figure in listed}
    assert {name: (f["value"], f["low"], f["high"], f["unit"]) for name, f in found.items()} == {
        "decode-bs1-ctx256/ours-ms": (10, 10, 20, "ms"),
        "decode-bs1-ctx256/upstream-ms": (30, 20, 40, "ms"),
        "decode-bs1-ctx256/vs-upstream": (2, 1.5, 4, "x"),
        "prefill-bs1-ctx256/ours-ms": (100, 100, 100, "ms"),
        "prefill-bs1-ctx256/upstream-ms": (50, 50, 50, "ms"),
        "prefill-bs1-ctx256/vs-upstream": (0.5, 0.5, 0.5, "x"),
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_switches_name_ops_and_their_implementations(name):
    family = FAMILIES[name]
    assert family.ours != family.upstream
    for setting in filter(None, (family.ours, family.upstream)):
        op, asked = setting.split("=")
        assert asked in {"upstream"} | {each.name for each in all_ops()[op].implementations}
