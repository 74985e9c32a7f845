# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, and what crosses from one to the next.

A stage may start at any layer. Where layers on both sides of a cut share a cache, `pipeline_cut` says what has to cross
besides the streams: such a cut is relayed.
"""

from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Sequence

from ..cache_layout import HEAD_DIM
from ..errors import UsageError
from ..model_spec import STREAMS, ModelSpec
from ..pipeline_cut import CANDIDATES, LATENT, SELECTIONS, TOPK, Cut, cut_at, scores_keys_of


@dataclass(frozen=True)
class Stage:
    """Layers `start` to `end` - 1 of the backbone; the last stage has the head and the draft as well."""

    start: int
    end: int
    first: bool
    last: bool

    def holds(self, layer: int) -> bool:
        """A backbone layer is one of this stage's."""
        return self.start <= layer < self.end


def stages(spec: ModelSpec, partition: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a partition, given as the layers of each stage.

    Raises:
        UsageError: a stage without layers, or another sum than the model's layers.
    """
    if not partition or min(partition) < 1 or sum(partition) != spec.num_hidden_layers:
        raise UsageError(
            f"partition {','.join(map(str, partition))} does not deal out {spec.num_hidden_layers} layers",
            f"give the layers of each stage, for example {','.join(map(str, even(spec.num_hidden_layers, 2)))}",
        )
    ends = tuple(accumulate(partition))
    return tuple(
        Stage(start, end, start == 0, end == ends[-1]) for start, end in zip((0, *ends), ends)
    )


def even(layers: int, count: int) -> tuple[int, ...]:
    """vLLM's own partition: equal stages, the remainder given to stages before the last one, from the back."""
    base, rest = divmod(layers, count)
    return tuple(base + (count - 1 - rest <= stage < count - 1) for stage in range(count))


def plain_cuts(spec: ModelSpec) -> tuple[int, ...]:
    """Layers, the first excepted, at which a stage may start without a relay."""
    return tuple(start for start in range(1, spec.num_hidden_layers) if cut_at(spec, start) is None)


def plain_partitions(spec: ModelSpec, count: int) -> list[tuple[int, ...]]:
    """Every partition into `count` stages without a relay."""
    found = []
    for cuts in combinations(plain_cuts(spec), count - 1):
        bounds = (0, *cuts, spec.num_hidden_layers)
        found.append(tuple(end - start for start, end in zip(bounds, bounds[1:])))
    return found


def relays(spec: ModelSpec, partition: Sequence[int]) -> tuple[Cut, ...]:
    """The relayed cuts of a partition."""
    cuts = (cut_at(spec, stage.start) for stage in stages(spec, partition))
    return tuple(cut for cut in cuts if cut)


def describe(cut: Cut) -> str:
    """What a relayed cut sends, in one line."""
    sent = ["latent", *["candidates"] * cut.candidates, *["top-k"] * cut.topk]
    return f"layer {cut.start} takes layer {cut.kv_source}'s {', '.join(sent)} from the stage before"


def copied_source(spec: ModelSpec, stage: Stage) -> tuple[int, bool] | None:
    """The layer before a stage of whose caches it keeps a copy, and whether index keys are among them."""
    cut = cut_at(spec, stage.start)
    return cut and (cut.kv_source, scores_keys_of(spec, stage.start, stage.end, cut.kv_source))


def relay_latents(spec: ModelSpec, stage: Stage) -> int:
    """Buffers of a step's latents that a stage has: those it is sent, and those of a source of its own that it sends."""
    after = cut_at(spec, stage.end)
    return bool(cut_at(spec, stage.start)) + bool(after and stage.holds(after.kv_source))


def payload_bytes(
    spec: ModelSpec, start: int, draft: bool, rows: int = 1, kept: int | None = None, context: int | None = None
) -> dict[str, int]:
    """Bytes of a step over the cut before layer `start` by tensor, all ranks of the tensor group counted once.

    Args:
        spec, start: the model and the first layer after the cut.
        draft: the features of a draft cross, each that is taken before the cut (the input of layer `start` is).
        rows: tokens of the step.
        kept: rows that bounded replay left, where the stage before runs on these and sends no others; None where
            it sends every row.
        context: the longest request of the step, tokens; by default the longest there can be. While every block
            of its rows is a candidate, candidates do not cross.
    """
    kept = rows if kept is None else kept
    found = {"hidden_states": kept * STREAMS * spec.hidden_size * 2, "pre_mix": kept * STREAMS * 4}
    if cut := cut_at(spec, start):
        found[LATENT] = rows * HEAD_DIM * 2
        visible = (context or spec.max_position_embeddings) // spec.layers[cut.kv_source].ratio
        if cut.candidates and visible > spec.candidate_topk_blocks * spec.candidate_block_size:
            found[CANDIDATES] = kept * spec.candidate_topk_blocks * 4
        if cut.topk:
            found[TOPK] = kept * spec.index_topk * 4
    features = sum(tap <= start for tap in spec.dspark_target_layer_ids) if draft else 0
    return found | {f"aux_hidden_states_{tap}": kept * spec.hidden_size * 2 for tap in range(features)}


def crossing_bytes(
    spec: ModelSpec, start: int, draft: bool, rows: int = 1, kept: int | None = None, context: int | None = None
) -> int:
    """The sum of `payload_bytes`."""
    return sum(payload_bytes(spec, start, draft, rows, kept, context).values())


def sent_bytes(payload: dict[str, int], tensor: int) -> int:
    """What one rank of a tensor group of `tensor` sends of a payload."""
    return sum(size if name in SELECTIONS else -(-size // tensor) for name, size in payload.items())
