# SPDX-License-Identifier: Apache-2.0
"""Whole plans: the budget adds up, refusals say how much is missing, and published deployments come out."""

import pytest

from vllm.ampere.errors import UsageError
from vllm.ampere.planner.inventory import parse
from vllm.ampere.planner.kv_blocks import KvBlocks
from vllm.ampere.planner.memory import GIB, Serving, workspace_bytes
from vllm.ampere.planner.pipeline import plain_partitions, relays, stages
from vllm.ampere.planner.plan import Layout, make_plan
from vllm.ampere.planner.presets import load
from vllm.ampere.planner.remedies import remedies
from vllm.ampere.planner.search import layouts, search

BOX = parse("8x80")
TP4_PP2 = Layout(tensor=4, partition=(20, 20))
# Stock vLLM: four requests are gathered for a prefill at once.
STOCK = {"gather_requests": 4}


def test_budget_adds_up(table):
    plan = make_plan(table, BOX, TP4_PP2, Serving(context=1 << 18))
    assert not plan.refusals
    for stage in plan.stages:
        used = stage.weights.total + sum(stage.workspace.values()) + stage.free_bytes
        assert used == int(80 * 0.92 * GIB)
        assert stage.blocks * stage.block_bytes <= stage.free_bytes < (stage.blocks + 1) * stage.block_bytes
    assert plan.blocks == min(stage.blocks for stage in plan.stages)
    assert plan.capacity_tokens == int(plan.concurrency * (1 << 18))


def test_a_refusal_says_exactly_how_much_is_missing(table):
    """A card with that much more holds one request; with a MiB less than that it does not."""
    serving = Serving()
    small = parse("8x47")
    plan = make_plan(table, small, TP4_PP2, serving)
    assert len(plan.refusals) == sum(stage.missing_bytes > 0 for stage in plan.stages) > 0
    assert f"lacks {plan.missing_bytes / GIB:.2f} GiB for one request of 1048576 tokens" in " ".join(plan.refusals)
    for extra, fits in ((plan.missing_bytes + 64, True), (plan.missing_bytes - 2**20, False)):
        grown = small.model_copy(update={"card_gib": 47 + extra / GIB / 0.92})
        assert bool(make_plan(table, grown, TP4_PP2, serving).refusals) is not fits


def test_six_cards_of_64_gb(table):
    """The relay adds 128 KiB of weights, 4096 latents of 1 KiB on both sides, and 9,216 bytes a token to what crosses."""
    preset = load("ga100-64g-x6-tp2-pp3")
    plan = make_plan(table, preset.inventory, preset.layout, preset.serving)
    assert preset.layout.partition == (14, 14, 12) and plan.relayed and not plan.refusals
    assert [round(stage.weights.total / GIB, 1) for stage in plan.stages] == [49.7, 48.6, 46.7]
    assert [stage.weights.relay for stage in plan.stages] == [0, 0, 131_328]
    assert [stage.workspace["relay"] for stage in plan.stages] == [0, 4096 * 1024, 4096 * 1024]
    assert [stage.copied_layer for stage in plan.stages] == [None, None, 20]
    assert [stage.crossing_bytes for stage in plan.stages] == [40_976, 50_192, 0]
    # The middle stage decides, so the copy on the last takes nothing from the cache.
    assert plan.blocks == plan.stages[1].blocks < plan.stages[2].blocks
    # At 14,13,13 the last decides: with window pages alone, 76,032 bytes, it would hold more.
    other = make_plan(table, preset.inventory, Layout(tensor=2, partition=(14, 13, 13)), preset.serving)
    assert other.blocks == other.stages[2].blocks
    alone = min(other.stages[0].blocks, other.stages[2].free_bytes // 76_032)
    assert round(1 - other.blocks / alone, 3) == 0.175 and other.capacity_tokens < plan.capacity_tokens


def test_candidates_of_short_contexts_do_not_cross(table):
    layout = Layout(tensor=2, partition=(14, 14, 12))
    plan = make_plan(table, parse("6x80"), layout, Serving(context=16_384))
    assert [stage.crossing_bytes for stage in plan.stages] == [40_976, 42_000, 0]


def test_another_partition_is_a_remedy(table):
    box = parse("6x64")
    plan = make_plan(table, box, Layout(tensor=2, partition=(8, 12, 20)), Serving())
    (first, *_) = remedies(table, plan)
    assert first == f"divided 14,14,12: {plan.missing_bytes / GIB:.2f} GiB less"
    assert not make_plan(table, box, Layout(tensor=2, partition=(14, 14, 12)), Serving()).refusals


def test_remedies_are_what_the_changes_give(table):
    box = parse("8x48")
    layout = Layout(tensor=8, partition=(40,))
    plan = make_plan(table, box, layout, Serving())
    found = remedies(table, plan)
    whole = make_plan(table, box, layout.model_copy(update={"expert_parallel": True}), Serving())
    assert f"with expert parallelism: {(plan.missing_bytes - whole.missing_bytes) / GIB:.2f} GiB less" in found
    assert [line.partition(":")[0] for line in found][0] == "for a context of 131072 tokens"
    gains = [float(line.split()[-3]) for line in found]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(
    "shape, layout, words",
    [
        ("6x64", Layout(tensor=6, partition=(40,)), "TP6 cannot share 8 output groups"),
        ("4x80", TP4_PP2, "TP4xPP2 takes 8 cards, there are 4"),
    ],
)
def test_impossible_layouts(table, shape, layout, words):
    plan = make_plan(table, parse(shape), layout, Serving())
    assert plan.stages == () and words in " ".join(plan.refusals)


def test_host_memory_is_checked_by_node(table):
    box = parse("2x8x40").model_copy(update={"host_gib": 200.0})
    layout = Layout(tensor=8, partition=(20, 20))
    plan = make_plan(table, box, layout, Serving(huge_pages=False))
    assert plan.refusals == ("node 0 pins 264.0 GiB for engram tables, it may pin 200.0",)
    assert plan.host_bytes[1] == 0
    assert "power of two" in plan.warnings[0]
    assert not make_plan(table, box, layout, Serving()).refusals


@pytest.mark.parametrize("drafted, warned", [(0, False), (5, False), (3, True), (7, True)])
def test_a_draft_of_another_length_is_warned_of(table, drafted, warned):
    plan = make_plan(table, BOX, TP4_PP2, Serving(draft_tokens=drafted))
    assert not plan.refusals
    assert any(f"a draft of {drafted} tokens: the checkpoint drafts 5" in line for line in plan.warnings) is warned


def test_a_context_longer_than_the_models(table):
    with pytest.raises(UsageError, match="more than the model's 1048576"):
        make_plan(table, BOX, TP4_PP2, Serving(context=(1 << 20) + 1))


def test_arguments(table):
    plan = make_plan(table, BOX, TP4_PP2, Serving(context=1 << 18, images=False, batched_tokens=4096))
    words = plan.arguments()
    options = dict(zip(words[::2], words[1::2]))
    assert plan.environment() == {"VLLM_PP_LAYER_PARTITION": "20,20"}
    assert options == {
        "--tensor-parallel-size": "4", "--pipeline-parallel-size": "2", "--max-model-len": "262144",
        "--max-num-batched-tokens": "4096", "--max-num-seqs": "32", "--gpu-memory-utilization": "0.92",
        "--engram-config": '{"cpu_offload":true,"use_thp":true}',
        "--speculative-config": '{"method":"dspark","num_speculative_tokens":5}',
        "--limit-mm-per-prompt": '{"image":0}',
    }
    whole = make_plan(table, BOX, Layout(tensor=8, partition=(40,), expert_parallel=True), Serving(draft_tokens=0))
    assert whole.environment() == {} and "--enable-expert-parallel" in whole.arguments()
    assert "--speculative-config" not in whole.arguments()


def test_search_lists_every_layout_once(table):
    found = list(layouts(table, BOX, Serving()))
    assert len(found) == len(set(map(str, [(each, each.partition) for each in found])))
    assert {each.cards for each in found} == {8}
    plain = {each.partition for each in found if not relays(table.spec, each.partition)}
    assert plain == {partition for count in (1, 2, 4, 8) for partition in plain_partitions(table.spec, count)}
    # Those with a relay: vLLM's own of four and of eight stages, and the largest caches.
    relayed = {(each.tensor, each.partition) for each in found if each.partition not in plain}
    assert {(2, (10, 10, 10, 10)), (1, (5,) * 8)} < relayed and len(found) <= 2 + 6 * 2 + 12 * 2 + 2


def test_search_puts_what_fits_first_and_the_fastest_of_it(table):
    plans = search(table, BOX, Serving(draft_tokens=0))
    fitting = [plan for plan in plans if not plan.refusals]
    assert plans[: len(fitting)] == fitting
    assert (fitting[0].layout.tensor, fitting[0].layout.partition) == (4, (20, 20))
    assert all(a.step.total <= b.step.total + 0.01 for a, b in zip(fitting, fitting[1:]))


def test_search_takes_a_relay_only_where_it_is_needed(table):
    """Six cards of 64 GiB need one; eight of 80 run as fast without, and with one would hold a little more."""
    best, *_ = search(table, parse("6x64"), Serving())
    assert (best.layout.tensor, best.layout.partition, best.relayed) == (2, (14, 14, 12), True)
    plans = search(table, BOX, Serving(draft_tokens=0))
    assert not plans[0].relayed
    assert any(plan.relayed and plan.capacity_tokens > plans[0].capacity_tokens for plan in plans if plan.stages)


def test_stock_prefill_workspace(table):
    """1M tokens: four requests of every token's row of 1 KiB. Ours takes one, and the indexer reads keys in their pages."""
    (whole,) = stages(table.spec, (40,))
    stock = workspace_bytes(table.spec, whole, 8, False, Serving(**STOCK))
    assert round(stock["gather"] / 1e9, 1) == 4.3
    ours = workspace_bytes(table.spec, whole, 8, False, Serving(context=1 << 18))
    assert ours["gather"] == (262_144 + 128 + 8192) * 1024


# Deployments that others have published, each with what it leaves unsaid in docs/en/topologies.md.


def test_published_weights_of_tp8(table):
    """36.59 GiB a card: without padding, so whole experts or another kernel."""
    plan = make_plan(table, BOX, Layout(tensor=8, partition=(40,), expert_parallel=True), Serving())
    assert plan.stages[0].weights.total / GIB == pytest.approx(36.59, rel=0.01)


def test_published_concurrency_at_256k(table):
    """34 requests of 262,144 tokens on eight cards of 80 GB at TP8."""
    box = load("a800-80g-x8-tp4-pp2").inventory
    layout = Layout(tensor=8, partition=(40,), expert_parallel=True)
    plan = make_plan(table, box, layout, Serving(context=1 << 18, draft_tokens=0, **STOCK))
    assert int(plan.concurrency) == 34


def test_published_weights_and_tokens_of_two_nodes(table):
    """16 cards of 40 GB: 20.5 GB a card, 5.65 million tokens with 2.2 GB for graphs and 2 GB for communication."""
    preset = load("a800-40g-x16-tp8-pp2")
    layout = preset.layout.model_copy(update={"expert_parallel": True})
    serving = Serving(graphs_gib=2.2e9 / GIB, runtime_gib=2e9 / GIB, **STOCK)
    plan = make_plan(table, preset.inventory, layout, serving)
    assert round(plan.stages[1].weights.total / 1e9, 1) == 20.5
    assert plan.capacity_tokens == pytest.approx(5.65e6, rel=0.25)
    # 4.0 GB, the pool that the same text names, holds half of that.
    kv = KvBlocks(table.spec, 5, 3 * serving.batched_tokens)
    assert kv.capacity_tokens(int(4.0e9) // 138_240, 1 << 20) < 5.65e6 / 2


def test_published_tokens_of_six_cards(table):
    """4,648,480 tokens on 6 x 64 GB at 14,14,12, which is 4.433 requests of 1M; the middle stage decides."""
    cut = stages(table.spec, (14, 14, 12))
    serving = Serving(batched_tokens=2048, gather_requests=1)
    kv = KvBlocks(table.spec, 5, 4 * serving.batched_tokens)
    held = table.rank(cut[1], 2, False, True, True).total
    workspace = sum(workspace_bytes(table.spec, cut[1], 2, False, serving).values())
    free = int(64 * 0.92 * GIB) - held - workspace
    assert kv.capacity_tokens(free // 138_240, 1 << 20) == pytest.approx(4_648_480, rel=0.25)
