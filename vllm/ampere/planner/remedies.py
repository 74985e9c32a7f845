# SPDX-License-Identifier: Apache-2.0
"""What would make a plan fit that lacks memory."""

from typing import Any

from .memory import GIB
from .plan import Layout, Plan, make_plan
from .splits import Splits
from .weights import WeightTable


def remedies(table: WeightTable, plan: Plan) -> list[str]:
    """What each single change gives the tightest card of a plan that lacks memory, greatest first."""
    serving, layout = plan.serving, plan.layout
    changes: dict[str, tuple[Layout, dict[str, Any]]] = {"without the draft": (layout, {"draft_tokens": 0})}
    if layout.tensor > 1 and not layout.expert_parallel:
        changes["with expert parallelism"] = (layout.model_copy(update={"expert_parallel": True}), {})
    changes["without images"] = (layout, {"images": False})
    for name, limit, words in (
        ("batched_tokens", 2048, "with 2048 batched tokens"),
        ("context", 1 << 17, "for a context of 131072 tokens"),
        ("requests", 8, "with 8 requests a step"),
    ):
        if getattr(serving, name) > limit:
            changes[words] = (layout, {name: limit})
    if len(layout.partition) > 1:
        group = layout.tensor, len(layout.partition), layout.expert_parallel
        splits = Splits(table, plan.inventory, serving, *group)
        divided = splits.layout(splits.largest_cache)
        changes[f"divided {','.join(map(str, divided.partition))}"] = (divided, {})
    gains = {}
    for words, (other, update) in changes.items():
        changed = make_plan(table, plan.inventory, other, serving.model_copy(update=update))
        gains[words] = plan.missing_bytes - changed.missing_bytes
    ordered = sorted(gains.items(), key=lambda gain: -gain[1])
    return [f"{words}: {gain / GIB:.2f} GiB less" for words, gain in ordered if gain > GIB / 100]
