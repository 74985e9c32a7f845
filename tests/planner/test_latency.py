# SPDX-License-Identifier: Apache-2.0
"""The latency model against published measurements, each within a quarter.

Three links are set by one figure each (NVLink and two-socket all-reduce, one hop between nodes); everything else
here is what the model says about other cases.
"""

import itertools

import pytest

from vllm.ampere.planner.inventory import LINKS, LinkKind
from vllm.ampere.planner.latency import (
    all_reduce_us, decode_step, distinct_experts, fullest_share, send_us, stage_chunk_ms, stage_step,
)
from vllm.ampere.planner.memory import Serving
from vllm.ampere.planner.pipeline import stages
from vllm.ampere.planner.plan import Layout, make_plan
from vllm.ampere.planner.presets import load

WITHIN = 0.25
TWO_ISLANDS = load("a800-80g-x8-tp4-pp2").inventory
TWO_NODES = load("a800-40g-x16-tp8-pp2").inventory


def close(published):
    return pytest.approx(published, rel=WITHIN)


def step(table, inventory, tensor, partition, tokens, draft=False):
    cut = stages(table.spec, partition)
    weights = [table.rank(stage, tensor, False, draft, True) for stage in cut]
    return decode_step(table.spec, cut, weights, inventory, tensor, False, tokens, draft)


def test_reduction_of_one_hidden_vector_over_two_sockets():
    assert all_reduce_us(LINKS[LinkKind.SOCKET], 8, 10_240) == close(44)


def test_reduction_over_nvlink():
    assert all_reduce_us(LINKS[LinkKind.NVLINK], 8, 10_240) == close(14)


def test_tensor_group_over_nodes_against_one_hop():
    """Two nodes: 80 reductions of 250 us against one hop of 15 us, for 14 KB."""
    network = LINKS[LinkKind.NETWORK]
    assert send_us(network, 14_336) == close(15)
    assert all_reduce_us(network, 16, 14_336) == close(250)
    assert 80 * all_reduce_us(network, 16, 14_336) / 1e3 == close(20)


def test_a_plan_over_nodes_says_so(table):
    across = TWO_NODES.model_copy(update={"cards": 4, "nodes": 2, "card_gib": 79.0})
    plan = make_plan(table, across, Layout(tensor=8, partition=(40,)), Serving(draft_tokens=0))
    assert plan.step.group is LinkKind.NETWORK
    assert plan.warnings == (
        "a tensor group spans nodes: 80 reductions x 119 us = 9.6 ms a step; put pipeline stages on nodes instead",
    )


def test_step_on_eight_pcie_cards(table):
    assert step(table, TWO_ISLANDS, 8, (40,), 1).total == close(13.45)


def test_verify_step_on_two_nodes(table):
    """One request with five drafted tokens: about 18 ms."""
    assert step(table, TWO_NODES, 8, (20, 20), 6, draft=True).total == close(18)


def test_verify_step_over_nvlink(table):
    """One request with five drafted tokens on eight A100 with NVLink: 12.16 to 13.25 ms by build."""
    assert step(table, load("a100-80g-x8-tp8").inventory, 8, (40,), 6, draft=True).total == close(13.25)


def test_crossover_on_two_islands(table):
    """Without a draft, PP2 answers one and two requests faster than TP8, and four slower."""
    def total(tensor, partition, requests):
        return step(table, TWO_ISLANDS, tensor, partition, requests).total

    faster = {n: total(4, (20, 20), n) < total(8, (40,), n) for n in (1, 2, 4, 8, 32)}
    assert faster == {1: True, 2: True, 4: False, 8: False, 32: False}


def test_islands_that_nvlink_joins_leave_nothing_for_a_pipeline(table):
    joined = TWO_ISLANDS.model_copy(update={"link": LinkKind.NVLINK})
    assert step(table, joined, 8, (40,), 1).total < step(table, joined, 4, (20, 20), 1).total


def chunks(table, partition, rows):
    box = load("ga100-64g-x6-tp2-pp3").inventory
    cut = stages(table.spec, partition)
    held = [table.rank(stage, 2, False, True, True) for stage in cut]
    return [stage_chunk_ms(table.spec, n, stage, held[n], box, 2, False, rows, True) for n, stage in enumerate(cut)]


def test_prefill_on_six_cards(table):
    """A prompt of 64K at 14,14,12: 4,507 tokens/s, which set the share of the matrix rate. The first stage decides."""
    first, middle, last = chunks(table, (14, 14, 12), 8192)
    assert first == max(first, middle, last) and 8192e3 / first == close(4507)


def test_rows_that_replay_drops_cost_nothing_behind_the_source(table):
    short, long = (chunks(table, (14, 14, 12), rows) for rows in (2048, 8192))
    assert long[2] == short[2] and long[0] == pytest.approx(4 * short[0], rel=0.01)
    # 128 of 8192 rows of layers 20 to 27 remain, and all rows of 14 to 19.
    assert long[1] == pytest.approx(long[0] * 6 / 14, rel=0.05)


def test_a_relayed_hop(table):
    """Two ranks send 29,192 bytes a token each over cut 28, and 20,488 over cut 14."""
    box = load("ga100-64g-x6-tp2-pp3").inventory
    cut = stages(table.spec, (14, 14, 12))
    for number, each in ((0, 20_488), (1, 29_192)):
        held = table.rank(cut[number], 2, False, True, True)
        hop = stage_step(table.spec, number, cut[number], held, box, 2, False, 192, True).hops
        first = number * 2
        assert hop == pytest.approx(send_us(box.link_between(first, first + 2), 192 * each) / 1e3)


def test_one_card_reduces_nothing():
    assert all_reduce_us(LINKS[LinkKind.NVLINK], 1, 1 << 20) == 0


def test_distinct_experts_by_counting():
    """Two tokens that choose 2 of 4 experts: average over all 36 pairs of choices."""
    choices = list(itertools.combinations(range(4), 2))
    union = [len(set(a) | set(b)) for a in choices for b in choices]
    assert distinct_experts(4, 2, 2) == pytest.approx(sum(union) / len(union))


def test_fullest_share_near_the_exact_expectation():
    """Three experts dropped on two ranks, all 8 ways: 2.25 on average; independent ranks come near it."""
    exact = sum(max(sum(way), 3 - sum(way)) for way in itertools.product((0, 1), repeat=3)) / 8
    assert exact == 2.25
    assert fullest_share(3, 2) == pytest.approx(exact, rel=0.1)
    assert fullest_share(384, 1) == pytest.approx(384, rel=1e-6)
