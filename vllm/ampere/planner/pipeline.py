# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages, and the layers before which a pipeline may be cut.

A layer of ratio > 0 reads compressed rows of its KV source and follows the selection of its index source.
Both exist on the source's stage only, so a stage must hold the sources of all of its layers.
"""

from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Sequence

from ..errors import UsageError
from ..model_spec import STREAMS, ModelSpec


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


def cut_refusal(spec: ModelSpec, start: int) -> str:
    """Why a stage may not start at layer `start`, in one line; empty if it may."""
    for layer in spec.layers[start:]:
        needs = [
            f"{what} of layer {source}"
            for what, source in (("compressed rows", layer.kv_source), ("selection", layer.index_source))
            if source is not None and source < start
        ]
        if needs:
            line = f"a stage cannot start at layer {start}: layer {layer.index} needs the {' and the '.join(needs)}"
            source = spec.kv_source_layer_ids[-1]
            if start > source:
                inside = f"{source}-{spec.num_hidden_layers - 1}"
                line += f"; cuts inside layers {inside} wait for the relay, which will carry them"
            return line
    return ""


def legal_cuts(spec: ModelSpec) -> tuple[int, ...]:
    """Layers, the first excepted, at which a stage may start."""
    return tuple(start for start in range(1, spec.num_hidden_layers) if not cut_refusal(spec, start))


def legal_partitions(spec: ModelSpec, count: int) -> list[tuple[int, ...]]:
    """Every partition into `count` stages whose cuts are legal."""
    found = []
    for cuts in combinations(legal_cuts(spec), count - 1):
        bounds = (0, *cuts, spec.num_hidden_layers)
        found.append(tuple(end - start for start, end in zip(bounds, bounds[1:])))
    return found


def crossing_bytes(spec: ModelSpec, start: int, draft: bool) -> int:
    """Bytes of one token over the cut before layer `start`, all ranks of the tensor group together.

    The bfloat16 streams and the float32 mix that the next layer applies; with a draft, each of its features
    that is taken before the cut (the input of layer `start` is taken there).
    """
    features = sum(tap <= start for tap in spec.dspark_target_layer_ids) if draft else 0
    return STREAMS * spec.hidden_size * 2 + STREAMS * 4 + features * spec.hidden_size * 2
