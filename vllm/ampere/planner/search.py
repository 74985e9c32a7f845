# SPDX-License-Identifier: Apache-2.0
"""Every layout of a model on a box, the best first."""

from typing import Iterator

from ..model_spec import ModelSpec
from .inventory import Inventory
from .memory import Serving
from .pipeline import even, legal_partitions
from .plan import Layout, Plan, make_plan
from .weights import WeightTable


def layouts(spec: ModelSpec, cards: int) -> Iterator[Layout]:
    """Every TP x PP x EP that takes all cards.

    Each legal partition; and vLLM's own equal one where that or the tensor group is impossible, so that the
    refusal can be read.
    """
    for tensor in range(cards, 0, -1):
        count = cards // tensor
        if cards % tensor or count > spec.num_hidden_layers:
            continue
        own = even(spec.num_hidden_layers, count)
        if spec.o_groups % tensor:
            yield Layout(tensor=tensor, partition=own)
            continue
        legal = legal_partitions(spec, count)
        for partition in legal + [own] * (own not in legal):
            for experts in (False, True)[: 1 + (tensor > 1)]:
                yield Layout(tensor=tensor, partition=partition, expert_parallel=experts)


def search(table: WeightTable, inventory: Inventory, serving: Serving) -> list[Plan]:
    """Plans of all layouts: those that fit first, by the time of one request's step, then by their cache."""
    plans = [make_plan(table, inventory, layout, serving) for layout in layouts(table.spec, inventory.total)]
    return sorted(plans, key=_rank)


def _rank(plan: Plan) -> tuple:
    # A hundredth of a millisecond is no difference.
    step = round(plan.step.total, 2) if plan.step else 0.0
    return bool(plan.refusals), not plan.stages, plan.missing_bytes, step, -plan.capacity_tokens
