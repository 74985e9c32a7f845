# SPDX-License-Identifier: Apache-2.0
"""Time of a decode step and of a prefill chunk, from link latencies, bandwidths and matrix rates.

A ring all-reduce of n cards takes 2(n-1) messages one after the other, each as slow as the slowest link of the
ring, and small ones cost nothing but latency; a fixed cost comes before every collective. Cards read their active
weights once a step and launch a fixed number of kernels a layer. Attention over a long context is left out: it
is the same in every layout that has the same tensor group.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Sequence

from ..cache_layout import HEAD_DIM
from ..model_spec import ModelSpec
from ..pipeline_cut import keeps_last_rows
from .inventory import Inventory, Link, LinkKind
from .pipeline import Stage, payload_bytes, sent_bytes
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
# Share of a card's matrix rate that a prefill reaches: what a published 4,507 tokens/s on six GA100 (TP2xPP3) leave.
MATRIX_EFFICIENCY = 0.09


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


@cache
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
    context: int | None = None,
) -> StepTime:
    """Time of one step of `tokens` rows that all pass the stages together.

    Requests that start together stay together, so this is also what several requests see: a pipeline only
    overlaps stages for requests that arrive apart.

    Args:
        spec, stages, weights: the model, its stages, and the bytes on each rank of each.
        inventory, tensor, expert_parallel, tokens, draft, context: see `stage_step`.
    """
    parts = [
        stage_step(spec, number, stage, held, inventory, tensor, expert_parallel, tokens, draft, context)
        for number, (stage, held) in enumerate(zip(stages, weights))
    ]
    sums = [sum(getattr(part, name) for part in parts) for name in ("launches", "weights", "reductions", "hops")]
    groups = [part.group for part in parts if part.group]
    return StepTime(*sums, max(groups, key=list(LinkKind).index, default=None))


def stage_step(
    spec: ModelSpec,
    number: int,
    stage: Stage,
    held: RankWeights,
    inventory: Inventory,
    tensor: int,
    expert_parallel: bool,
    tokens: int,
    draft: bool = False,
    context: int | None = None,
) -> StepTime:
    """Time that one stage is busy in a step of `tokens` rows, the message to the next one included.

    Args:
        spec: the model.
        number, stage, held: the stage's place in the pipeline, its layers, and the bytes on each of its ranks.
        inventory: cards, numbered so that stage s has the cards s * tensor to (s + 1) * tensor - 1.
        tensor, expert_parallel: the layout of each stage.
        tokens: rows of the step, drafted ones included.
        draft: DSpark's layers run too; their launches and reductions are counted, their weights are not.
        context: the longest request, tokens; None for the longest there can be.
    """
    layers = stage.end - stage.start + (spec.num_nextn_predict_layers if draft and stage.last else 0)
    launches = layers * LAUNCHES_PER_LAYER * LAUNCH_US / 1e3
    read = _read_bytes(spec, held, tensor, expert_parallel, tokens) + held.head
    group, each = _reduction(spec, number, inventory, tensor, tokens)
    hop = _hop_ms(number, stage, inventory, tensor, payload_bytes(spec, stage.end, draft, tokens, None, context))
    return StepTime(launches, _read_ms(inventory, read), layers * REDUCTIONS_PER_LAYER * each / 1e3, hop, group)


def stage_chunk_ms(
    spec: ModelSpec,
    number: int,
    stage: Stage,
    held: RankWeights,
    inventory: Inventory,
    tensor: int,
    expert_parallel: bool,
    tokens: int,
    draft: bool = False,
    context: int | None = None,
) -> float:
    """Milliseconds that one stage is busy with a chunk of one long prompt, under bounded replay.

    Layers before the last KV source run on all rows, it and those after it on the last window of them. A layer takes
    as long as its matrix products or as reading its weights, whichever is longer. The draft is left out.

    Args:
        spec, number, stage, held, inventory, tensor, expert_parallel, draft, context: see `stage_step`.
        tokens: rows of the chunk.
    """
    source, layers, kept = spec.kv_source_layer_ids[-1], stage.end - stage.start, min(spec.sliding_window, tokens)
    behind = max(0, stage.end - max(stage.start, source))
    padding = 1 + held.expert_padding / (held.experts + held.draft)
    busy = 0.0
    for count, rows in ((layers - behind, tokens), (behind, kept)):
        products = rows * _row_flops(spec, padding) / tensor / inventory.matrix_tflops / MATRIX_EFFICIENCY / 1e9
        read = _read_ms(inventory, _read_bytes(spec, held, tensor, expert_parallel, rows) / layers)
        _, each = _reduction(spec, number, inventory, tensor, rows)
        launches = LAUNCHES_PER_LAYER * LAUNCH_US
        busy += count * (max(products, read) + (launches + REDUCTIONS_PER_LAYER * each) / 1e3)
    sent = payload_bytes(spec, stage.end, draft, tokens, kept if keeps_last_rows(spec, stage.end) else None, context)
    return busy + _hop_ms(number, stage, inventory, tensor, sent)


def _row_flops(spec: ModelSpec, padding: float) -> float:
    """Operations of one row in one layer of the backbone; scoring a long context is left out."""
    inner = spec.num_attention_heads * HEAD_DIM
    experts = 3 * spec.moe_intermediate_size * spec.hidden_size * (spec.num_experts_per_tok * padding + 1)
    projections = (
        spec.hidden_size * (spec.q_lora_rank + HEAD_DIM + spec.o_groups * spec.o_lora_rank)
        + inner * (spec.q_lora_rank + spec.o_lora_rank)
    )
    return 2 * (experts + projections) + 4 * inner * (spec.index_topk + spec.sliding_window)


def _read_bytes(spec: ModelSpec, held: RankWeights, tensor: int, expert_parallel: bool, tokens: int) -> float:
    """Weights of a stage's backbone that a rank reads for `tokens` rows."""
    needed = distinct_experts(spec.n_routed_experts, spec.num_experts_per_tok, tokens)
    share = needed / spec.n_routed_experts
    if expert_parallel:
        share = min(1.0, share * fullest_share(needed, tensor) / (needed / tensor))
    experts = held.experts + (0 if expert_parallel else held.expert_padding)
    return held.dense + held.wo_a_bf16 + share * experts


def _read_ms(inventory: Inventory, nbytes: float) -> float:
    return nbytes / inventory.memory_gb_s / READ_EFFICIENCY / 1e6


def _reduction(
    spec: ModelSpec, number: int, inventory: Inventory, tensor: int, tokens: int
) -> tuple[LinkKind | None, float]:
    """The slowest link of a stage's tensor group, and microseconds of one all-reduce over it."""
    if tensor == 1:
        return None, 0.0
    ends = number * tensor, (number + 1) * tensor - 1
    link = inventory.link_between(*ends)
    return inventory.kind_between(*ends), all_reduce_us(link, tensor, tokens * spec.hidden_size * 2)


def _hop_ms(number: int, stage: Stage, inventory: Inventory, tensor: int, payload: dict[str, int]) -> float:
    if stage.last:
        return 0.0
    link = inventory.link_between(number * tensor, (number + 1) * tensor)
    return send_us(link, sent_bytes(payload, tensor)) / 1e3
