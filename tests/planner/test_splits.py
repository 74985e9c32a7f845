# SPDX-License-Identifier: Apache-2.0
"""The best partitions, against every partition tried one by one."""

import math
import operator
import random
from itertools import combinations

import pytest

from vllm.ampere.planner.inventory import Inventory, parse
from vllm.ampere.planner.latency import stage_chunk_ms, stage_step
from vllm.ampere.planner.memory import Serving
from vllm.ampere.planner.pipeline import relays, stages
from vllm.ampere.planner.plan import Layout, make_plan
from vllm.ampere.planner.splits import Splits, best, divide

SERVING = Serving(context=1 << 18, batched_tokens=4096)
SIX = Inventory(cards=6, card_gib=63.3, island=2)


def partitions(layers, count, cuts):
    for chosen in combinations(sorted(cuts), count - 1):
        bounds = (0, *chosen, layers)
        yield tuple(end - start for start, end in zip(bounds, bounds[1:]))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("combine", [max, operator.add])
def test_divide_is_the_best_of_all(seed, combine):
    """Random costs, some of them forbidden, over random cuts."""
    rng = random.Random(f"{seed} {combine.__name__}")
    layers, count = rng.randint(5, 9), rng.randint(1, 4)
    cuts = rng.sample(range(1, layers), rng.randint(count - 1, layers - 1))
    known = {}

    def cost(number, stage):
        assert (stage.first, stage.last) == (number == 0, number == count - 1)
        return known.setdefault((number, stage), math.inf if rng.random() < 0.15 else rng.random())

    found = divide(layers, count, cuts, cost, combine)
    values = {}
    for partition in partitions(layers, count, cuts):
        bounds = [sum(partition[:number]) for number in range(count + 1)]
        total = None
        for number, (start, end) in enumerate(zip(bounds, bounds[1:])):
            each = next((value for (n, s), value in known.items() if (n, s.start, s.end) == (number, start, end)), math.inf)
            total = each if total is None else combine(total, each)
        values[partition] = total
    least = min(values.values())
    if least == math.inf:
        assert found is None
    else:
        assert found[0] == pytest.approx(least) and values[found[1]] == pytest.approx(least)


@pytest.fixture(scope="module")
def every(table):
    """All 741 partitions of six cards into three stages that hold a request, by busiest stage and blocks."""
    found = {}
    for partition in partitions(40, 3, range(1, 40)):
        plan = make_plan(table, SIX, Layout(tensor=2, partition=partition), SERVING)
        if not plan.refusals:
            found[partition] = plan
    assert 0 < len(found) < 100
    return found


def busiest(table, plan, time, rows):
    spec, cut = table.spec, stages(table.spec, plan.layout.partition)
    return max(
        time(spec, number, stage, each.weights, SIX, 2, False, rows, True, SERVING.context)
        for number, (stage, each) in enumerate(zip(cut, plan.stages))
    )


def test_the_largest_cache(table, every):
    splits = Splits(table, SIX, SERVING, 2, 3, False)
    assert every[splits.largest_cache].blocks == max(plan.blocks for plan in every.values())
    assert splits.missing_bytes == 0


def test_for_prefill(table, every):
    """Among all partitions the fastest to a hundredth, and of these the one with the largest cache."""
    found = Splits(table, SIX, SERVING, 2, 3, False).for_prefill()
    times = {partition: busiest(table, plan, stage_chunk_ms, 4096) for partition, plan in every.items()}
    near = [partition for partition, ms in times.items() if ms <= min(times.values()) * 1.01]
    partition = found.plan.layout.partition
    assert partition in near and found.plan.blocks == max(every[each].blocks for each in near)
    assert found.per_second == pytest.approx(4096e3 / times[partition])


def test_for_decode(table, every):
    """Steps a second at every number of requests that the cache holds: the best of all partitions to a hundredth."""
    found = Splits(table, SIX, SERVING, 2, 3, False).for_decode()
    rates = []
    for requests in (1, 2, 4, 8, 16, 32):
        rows = -(-requests // 3) * 6
        rates += [
            requests * 1e3 / 3 / busiest(table, plan, lambda *a: stage_step(*a).total, rows)
            for plan in every.values() if plan.concurrency >= requests
        ]
    assert max(rates) / 1.01 <= found.per_second <= max(rates)


def test_prefill_moves_layers_behind_the_source_and_decode_levels_them(table):
    """Two stages of four cards: with long prompts the first has fewer layers, since the second runs on few rows."""
    box = parse("8x80")
    plain = best(table, box, SERVING, relayed=False).loads
    assert plain["prefill"].plan.layout.partition in ((8, 32), (14, 26))
    found = best(table, box, SERVING, relayed=True).loads
    assert found["prefill"].per_second > plain["prefill"].per_second * 1.1
    assert relays(table.spec, found["prefill"].plan.layout.partition)
    assert found["decode"].per_second >= plain["decode"].per_second


def test_a_box_that_is_too_small(table):
    """What is lacking is what the layout that lacks least lacks; three stages need less than the cuts without a relay."""
    without, with_relay = (best(table, parse("6x48"), SERVING, relayed) for relayed in (False, True))
    assert without.loads == with_relay.loads == {}
    three = Splits(table, parse("6x48"), SERVING, 2, 3, False)
    plan = make_plan(table, parse("6x48"), three.layout(three.largest_cache), SERVING)
    assert three.missing_bytes == plan.missing_bytes and with_relay.missing_bytes <= plan.missing_bytes
    assert 0 < with_relay.missing_bytes < without.missing_bytes
