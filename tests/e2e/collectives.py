# SPDX-License-Identifier: Apache-2.0
"""Collectives of a tensor group, layer by layer, as `StageRecorder` counts them in an eager engine."""

from collections import Counter

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.latency import REDUCTIONS_PER_LAYER

# An engram gathers the heads that other ranks looked up, and the columns of their product.
GATHERS_PER_ENGRAM = 2


def in_layers(worker: dict) -> Counter:
    """(layer, collective) -> calls, from `StageRecorder.take_stage`; embedding, head and draft are left out."""
    return Counter((layer, name) for layer, name, _ in worker["collectives"] if layer != "outside")


def expected(spec: ModelSpec, layers: range, steps: int) -> Counter:
    """`in_layers` of a stage with these layers after so many steps."""
    sums = Counter({(layer, "all_reduce"): REDUCTIONS_PER_LAYER * steps for layer in layers})
    gathers = {(layer, "all_gather"): GATHERS_PER_ENGRAM * steps for layer in spec.engram_layer_ids if layer in layers}
    return sums + Counter(gathers)
