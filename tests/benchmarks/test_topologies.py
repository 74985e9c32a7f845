# SPDX-License-Identifier: Apache-2.0
"""Topologies of the whole model: what a name asks for, what the planner says of it, and which figure holds what."""

import pytest

from benchmarks.bench_topologies import DEFAULT, FULL, GIB, OPTIONS, POINTS, PRESET, Topology, figures_of, parting, planned
from vllm.ampere.planner.inventory import Inventory
from vllm.ampere.testing import tiny_config


def test_names():
    read = {text: Topology.parse(text) for text in DEFAULT}
    cards = {text: each.cards for text, each in read.items()}
    assert cards == {"8:40": 8, "8:40:ep": 8, "4:20,20": 8, "2:8,12,20": 6, "2:14,14,12": 6}
    assert all(sum(each.partition) == FULL["num_hidden_layers"] for each in read.values())
    assert read["8:40:ep"].options()["enable_expert_parallel"] and not read["8:40"].environment()
    assert read["2:14,14,12"].environment() == {"VLLM_PP_LAYER_PARTITION": "14,14,12"}


@pytest.mark.parametrize("text", ["", "8", "0:40", "8:", "8:40,", "8:40:tp", "8:4 0"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError):
        Topology.parse(text)


def test_the_planners_view_of_the_whole_model():
    """Ranks of all topologies hold the same model: about 285 GiB and what ranks hold each."""
    config = tiny_config.build_config(tiny_config.resolve(PRESET, FULL), 4_096)
    cards = Inventory(cards=8, card_gib=140, link="nvlink")
    for text in DEFAULT:
        topology = Topology.parse(text)
        plan = planned(config, topology, cards, OPTIONS["kv_cache_memory_bytes"])
        total = sum(plan["weights_bytes"]) * topology.tensor
        assert 280 < total / GIB < 320 and len(plan["weights_bytes"]) == len(topology.partition)
        assert plan["cache_tokens"] > OPTIONS["max_model_len"] and sorted(plan["step_ms"]) == [1, 8, 32]


def test_where_tokens_part():
    first = [{"7": -0.1, "3": -3.0}, {"4": -0.5, "9": -0.6, "2": -4.0}]
    assert parting(first, first) == (2, 0.0)
    step, gap = parting([first[0], {"9": -0.5, "4": -0.7}], first)
    assert step == 1 and gap == pytest.approx(0.1)
    assert parting([{"8": -0.2}, {}], first) == (0, pytest.approx(2.9))  # not among its best: at least that


def test_figures():
    step = {"3": -0.1}
    point = {"token_s": 0.004, "prefill_s": 2.0}
    seen = {f"bs{requests}-ctx{context}": point for requests, context in POINTS}
    seen |= {"held_bytes": [40 * GIB] * 8, "continued": [[step] * 24], "cache_tokens": 900}
    slower = seen | {"bs8-ctx256": {"token_s": 0.006, "prefill_s": 2.0}, "held_bytes": [40 * GIB] * 7 + [38 * GIB],
                     "continued": [[step] * 6 + [{"5": -0.1}] * 18]}  # fmt: skip
    plan = {"weights_bytes": [40 * GIB], "cache_tokens": 1000, "step_ms": {1: 2.0, 8: 2.0, 32: 2.0}}
    behind = {"weights_bytes": [40 * GIB] * 2, "cache_tokens": 1000, "step_ms": {1: 2.0, 8: 5.0, 32: 2.0}}
    figures = figures_of({"8:40": seen, "4:20,20": slower}, {"8:40": plan, "4:20,20": behind})
    found = {figure["id"].removeprefix("topologies/"): figure["value"] for figure in figures}
    assert found["8:40/weights-over-planned"] == 1.0 and found["4:20,20/weights-over-planned"] == 0.95
    assert found["4:20,20/cache-tokens-over-planned"] == 0.9
    assert found["8:40/tokens-as-8:40"] == 1.0 and found["4:20,20/tokens-as-8:40"] == 0.25
    assert found["4:20,20/bs8-ctx256/over-8:40"] == 1.5 and found["4:20,20/bs8-ctx256/planned-over-8:40"] == 2.5
    assert found["8:40/bs1-ctx16k/prefill-rate"] == 8192
