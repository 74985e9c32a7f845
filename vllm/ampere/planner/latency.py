# SPDX-License-Identifier: Apache-2.0
"""Time of a decode step, from link latencies and bandwidths: which layout answers one request fastest.

A ring all-reduce of n cards takes 2(n-1) messages one after the other, each as slow as the slowest link of the
ring, and small ones cost nothing but latency; a fixed cost comes before every collective. Cards read their active
weights once a step and launch a fixed number of kernels a layer. Attention over a long context is left out: it
is the same in every layout that has the same tensor group.
"""

import math
from dataclasses import dataclass
from typing import Sequence

from ..model_spec import ModelSpec
from .inventory import Inventory, Link, LinkKind
from .pipeline import Stage, crossing_bytes
from .weights import RankWeights

# Before the first message of a collective leaves: launch and synchronisation (a published figure for A100s).
COLLECTIVE_FIXED_US = 6.0
# Attention output and expert output of each layer are summed over the group.
REDUCTIONS_PER_LAYER = 2
# 1,845 launches in 40 layers, in a captured graph (published for 8 A800); the time of each is what its
# 13.45 ms step leaves after reductions and weights.
LAUNCHES_PER_LAYER = 46
LAUNCH_US = 4.6
# Share of a card's memory bandwidth that small matrix products reach.
READ_EFFICIENCY = 0.6


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one decode step, every stage one after the other.

    Attributes:
        launches: kernels' fixed costs.
        weights: reading the active weights.
        reductions: all-reduces of every layer.
        hops: activations from stage to stage.
        group: the slowest link inside a tensor group.
    """

    launches: float
    weights: float
    reductions: float
    hops: float
    group: LinkKind | None

    @property
    def total(self) -> float:
        return self.launches + self.weights + self.reductions + self.hops


def all_reduce_us(link: Link, cards: int, nbytes: int) -> float:
    """Microseconds to sum `nbytes` over `cards` cards in a ring whose slowest link is `link`."""
    if cards == 1:
        return 0.0
    steps = 2 * (cards - 1)
    return COLLECTIVE_FIXED_US + steps * link.latency_us + steps / cards * nbytes / link.gb_s / 1e3


def send_us(link: Link, nbytes: int) -> float:
    """Microseconds to send `nbytes` to the next stage."""
    return COLLECTIVE_FIXED_US + link.latency_us + nbytes / link.gb_s / 1e3


def distinct_experts(experts: int, per_token: int, tokens: int) -> float:
    """Experts that `tokens` tokens are expected to need between them, if each chooses at random."""
    return experts * (1 - (1 - per_token / experts) ** tokens)


def fullest_share(chosen: float, ranks: int) -> float:
    """Experts of `chosen` on the fullest of `ranks` ranks, if every rank holds a Poisson number of them."""
    mean, below, expected = chosen / ranks, 0.0, 0.0
    for count in range(math.ceil(mean + 10 * math.sqrt(mean) + 10)):
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
        expected += 1 - min(below, 1.0) ** ranks
    return expected


def decode_step(
    spec: ModelSpec,
    stages: Sequence[Stage],
    weights: Sequence[RankWeights],
    inventory: Inventory,
    tensor: int,
    expert_parallel: bool,
    tokens: int,
    draft: bool = False,
) -> StepTime:
    """Time of one step of `tokens` rows that all pass the stages together.

    Requests that start together stay together, so this is also what several requests see: a pipeline only
    overlaps stages for requests that arrive apart.

    Args:
        spec, stages, weights: the model, its stages, and the bytes on each rank of each.
        inventory: cards, numbered so that stage s has the cards s * tensor to (s + 1) * tensor - 1.
        tensor, expert_parallel: the layout of each stage.
        tokens: rows of the step, drafted ones included.
        draft: DSpark's layers run too; their launches and reductions are counted, their weights are not.
    """
    read = launches = reductions = hops = 0.0
    group = None
    needed = distinct_experts(spec.n_routed_experts, spec.num_experts_per_tok, tokens)
    for number, (stage, held) in enumerate(zip(stages, weights)):
        first = number * tensor
        layers = stage.end - stage.start + (spec.num_nextn_predict_layers if draft and stage.last else 0)
        launches += layers * LAUNCHES_PER_LAYER * LAUNCH_US / 1e3
        share = needed / spec.n_routed_experts
        if expert_parallel:
            share = min(1.0, share * fullest_share(needed, tensor) / (needed / tensor))
        dense = held.dense + held.wo_a_bf16 + held.head
        read += dense + share * (held.experts + (0 if expert_parallel else held.expert_padding))
        if tensor > 1:
            ends = first, first + tensor - 1
            link, kind = inventory.link_between(*ends), inventory.kind_between(*ends)
            group = kind if group is None else max(group, kind, key=list(LinkKind).index)
            each = all_reduce_us(link, tensor, tokens * spec.hidden_size * 2)
            reductions += layers * REDUCTIONS_PER_LAYER * each / 1e3
        if not stage.last:
            link = inventory.link_between(first, first + tensor)
            hops += send_us(link, tokens * crossing_bytes(spec, stage.end, draft) // tensor) / 1e3
    return StepTime(launches, read / inventory.memory_gb_s / READ_EFFICIENCY / 1e6, reductions, hops, group)
