# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights on every rank, to the byte of each tensor of the table (model_spec section 14).

How vLLM holds them on Ampere: dense E4M3 weights with their scales repeated to one byte a row and 32 inputs,
padded to Marlin's tiles; `wo_a` decoded to bfloat16; experts as stored, save that the down projection's inputs on
a rank are padded as `expert_layout` says. Embedding, head, `wq_b`, `wo_a`, `wo_b`, shared and routed
experts, the engram projection and the vision tower are sharded over the tensor group, all else is on each rank.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Mapping, NamedTuple

from ..cache_layout import ENGRAM_DIM, ENGRAM_SCALES
from ..expert_layout import down_inputs
from ..model_spec import ModelSpec
from ..tensor_table import TILE, TensorSpec, expected_tensors
from .pipeline import Stage, copied_source

# Sizes of the released vision tower that ModelSpec does not carry.
RELEASED_VISION = {"hidden_size": 1024, "intermediate_size": 2816, "patch_size": 14, "downsample_ratio": 3}
_HUGE_PAGE_BYTES = 2**21
_COLUMN = re.compile(r"((?<!indexer)\.wq_b|\.wo_a|shared_experts\.w[13]|engram\.wkv)$")
_ROW = re.compile(r"\.(wo_b|shared_experts\.w2)$")
_KEYS = re.compile(r"\.indexer\.(wk|k_norm)$")


class _Kind(NamedTuple):
    """What decides the bytes of a tensor on a rank."""

    place: str | int
    module: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RankWeights:
    """Bytes on one rank of one stage.

    Attributes:
        experts: routed experts of the backbone as stored; `expert_padding` is what Marlin's padding adds,
            the draft's experts included.
        dense: everything else of the layers, with `wo_a` counted as E4M3; `wo_a_bf16` is what decoding it adds,
            the draft's included.
        embed, head, vision: on the first, last and first stage.
        draft: DSpark's layers and heads, on the last stage; `draft_embed` is its own copy of the token
            embedding, needed where the last stage is not the first.
        relay: the index key's projection and norm of a source on an earlier stage, where keys are copied.
    """

    experts: int = 0
    expert_padding: int = 0
    dense: int = 0
    wo_a_bf16: int = 0
    embed: int = 0
    head: int = 0
    vision: int = 0
    draft: int = 0
    draft_embed: int = 0
    relay: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


class WeightTable:
    """The tensors of a model, counted once so that every layout is a short sum.

    Args:
        spec: the model's dimensions.
        tensors: its tensors; by default those of the release.
    """

    def __init__(self, spec: ModelSpec, tensors: Iterable[TensorSpec] | None = None):
        if tensors is None:
            config = spec.to_config()
            config["vision_config"].update(RELEASED_VISION)
            tensors = expected_tensors(config)
        self.spec = spec
        self._counts: Counter[_Kind] = Counter()
        self._places: dict[tuple[str | int, int, bool], Counter[str]] = {}
        self.tensor_bytes = 0
        for tensor in tensors:
            self._counts[_kind(tensor)] += 1
            self.tensor_bytes += tensor.nbytes

    @cached_property
    def _kinds(self) -> Mapping[str | int, list[tuple[_Kind, int]]]:
        found: dict[str | int, list[tuple[_Kind, int]]] = {}
        for kind, count in self._counts.items():
            found.setdefault(kind.place, []).append((kind, count))
        return found

    def rank(self, stage: Stage, tensor: int, expert_parallel: bool, draft: bool, images: bool) -> RankWeights:
        """Bytes on each rank of a stage.

        Args:
            stage: its layers.
            tensor: ranks of the tensor group.
            expert_parallel: whole experts are dealt out over the group instead of slices of each.
            draft: DSpark is loaded.
            images: the vision tower is loaded.
        """
        parts: Counter[str] = Counter()
        places: list[str | int] = [layer for layer in range(stage.start, stage.end)]
        places += ["embed"] * stage.first + ["vision"] * (stage.first and images)
        places += ["head"] * stage.last + ["draft"] * (stage.last and draft)
        for place in places:
            parts.update(self._place(place, tensor, expert_parallel))
        if stage.last and draft and not stage.first:
            parts["draft_embed"] = sum(count * _dense_bytes(kind, tensor)[1] for kind, count in self._kinds["embed"])
        source, keys = copied_source(self.spec, stage) or (None, False)
        if keys:
            parts["relay"] = sum(
                count * _dense_bytes(kind, tensor)[1]
                for kind, count in self._kinds[source] if _KEYS.search(kind.module)
            )
        return RankWeights(**parts)

    def _place(self, place: str | int, tensor: int, expert_parallel: bool) -> Counter[str]:
        """Bytes of a layer, or of what is outside the layers, on a rank: counted once, asked for by every stage."""
        key = place, tensor, expert_parallel
        if key not in self._places:
            parts = self._places[key] = Counter()
            for kind, count in self._kinds.get(place, ()):
                if kind.module.endswith(".experts"):
                    stored, padded = _expert_bytes(kind, count, tensor, expert_parallel)
                    parts["draft" if place == "draft" else "experts"] += stored
                    parts["expert_padding"] += padded - stored
                else:
                    as_e4m3, held = _dense_bytes(kind, tensor)
                    parts[place if isinstance(place, str) else "dense"] += count * as_e4m3
                    parts["wo_a_bf16"] += count * (held - as_e4m3)
        return self._places[key]


def host_bytes(spec: ModelSpec, stage: Stage, tensor: int, huge_pages: bool) -> int:
    """Pinned host memory for the engram tables of a stage, all ranks of its tensor group together.

    Hash columns are dealt out over the group. PyTorch pins a power of two for each tensor; with transparent
    huge pages (`use_thp`) values and scales share one allocation of whole 2 MiB pages.
    """
    total = 0
    for layer, orders in zip(spec.engram_layer_ids, spec.engram_primes):
        if not stage.holds(layer):
            continue
        columns = [rows for heads in orders for rows in heads]
        share = -(-len(columns) // tensor)
        for first in range(0, len(columns), share):
            rows = sum(columns[first : first + share])
            if huge_pages:
                total += _up(rows * (ENGRAM_DIM + ENGRAM_SCALES), _HUGE_PAGE_BYTES)
            else:
                total += _power_of_two(rows * ENGRAM_DIM) + _power_of_two(rows * ENGRAM_SCALES)
    return total


def _kind(tensor: TensorSpec) -> _Kind:
    words = tensor.name.split(".")
    module = f"{words[-2]}.experts" if ".ffn.experts." in tensor.name else tensor.name.rpartition(".")[0]
    if ".engram.embed." in tensor.name:
        place: str | int = "host"
    elif words[0] == "layers":
        place = int(words[1])
    else:
        place = {"mtp": "draft", "embed": "embed", "head": "head", "norm": "head"}.get(words[0], "vision")
    return _Kind(place, module, tensor.dtype, tensor.shape)


def _expert_bytes(kind: _Kind, count: int, tensor: int, whole: bool) -> tuple[int, int]:
    """Bytes of `count` expert tensors on a rank: as stored, and with Marlin's padding."""
    rows, columns = kind.shape
    values = TILE if kind.dtype == "F8_E8M0" else 2
    wide = kind.module.startswith("w2")
    hidden, intermediate = (rows, columns * values) if wide else (columns * values, rows)
    if whole:
        count = -(-count // tensor)
    else:
        intermediate //= tensor
    padded = down_inputs(intermediate) if wide else intermediate
    return count * intermediate * hidden // values, count * padded * hidden // values


def _dense_bytes(kind: _Kind, tensor: int) -> tuple[int, int]:
    """Bytes of one other tensor on a rank, `wo_a` as E4M3, and as it is held."""
    size = math.prod(kind.shape)
    if kind.dtype == "F8_E8M0":
        return 0, 0  # counted with its weight, one byte a row and 32 inputs
    if kind.dtype == "F8_E4M3":
        rows, inner = kind.shape
        if _COLUMN.search(kind.module):
            rows //= tensor
        elif _ROW.search(kind.module):
            inner //= tensor
        return _e4m3_bytes(kind.module, rows, inner)
    width = 4 if kind.dtype == "F32" else 2
    if kind.place == "vision" or kind.module in ("embed", "head"):
        return -(-size // tensor) * width, -(-size // tensor) * width
    return size * width, size * width


def _e4m3_bytes(module: str, rows: int, inner: int) -> tuple[int, int]:
    if module.endswith("wo_a"):
        return rows * inner + rows * inner // TILE, 2 * rows * inner
    # w1 and w3 of a shared expert lie in one weight.
    fused = 2 if module.endswith(("shared_experts.w1", "shared_experts.w3")) else 1
    size = min(_up(fused * rows, 64) * _up(inner, 128), _up(fused * rows, 128) * _up(inner, 64)) // fused
    return size + size // TILE, size + size // TILE


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
