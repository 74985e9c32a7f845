# SPDX-License-Identifier: Apache-2.0
"""Every layout of a model on a box, the best first."""

from typing import Iterator

from .inventory import Inventory
from .memory import Serving
from .pipeline import even, plain_partitions
from .plan import Layout, Plan, make_plan
from .splits import Splits
from .weights import WeightTable


def layouts(table: WeightTable, inventory: Inventory, serving: Serving) -> Iterator[Layout]:
    """Every TP x PP x EP that takes all cards.

    Each partition without a relay; of those with one, vLLM's own equal one and the one with the largest cache. A tensor
    group that is impossible comes once, so that the refusal can be read.
    """
    spec, cards = table.spec, inventory.total
    for tensor in range(cards, 0, -1):
        count = cards // tensor
        if cards % tensor or count > spec.num_hidden_layers:
            continue
        own = even(spec.num_hidden_layers, count)
        if spec.o_groups % tensor:
            yield Layout(tensor=tensor, partition=own)
            continue
        for experts in (False, True)[: 1 + (tensor > 1)]:
            largest = Splits(table, inventory, serving, tensor, count, experts).largest_cache
            for partition in dict.fromkeys((*plain_partitions(spec, count), own, largest)):
                yield Layout(tensor=tensor, partition=partition, expert_parallel=experts)


def search(table: WeightTable, inventory: Inventory, serving: Serving) -> list[Plan]:
    """Plans of all layouts: those that fit first, by the time of one request's step, without a relay, by their cache."""
    plans = [make_plan(table, inventory, layout, serving) for layout in layouts(table, inventory, serving)]
    return sorted(plans, key=_rank)


def _rank(plan: Plan) -> tuple:
    # A hundredth of a millisecond is no difference.
    step = round(plan.step.total, 2) if plan.step else 0.0
    return bool(plan.refusals), not plan.stages, plan.missing_bytes, step, plan.relayed, -plan.capacity_tokens
