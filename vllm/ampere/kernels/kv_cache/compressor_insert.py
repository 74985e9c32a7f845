# SPDX-License-Identifier: Apache-2.0
"""Rotate, quantise and store compressed rows in the cache of a KV source layer.

The record is the window cache's; a row exists only for the token that closes its group, and is rotated
at the position of the group's first token.
"""

import torch

from ...errors import ContractError
from ..contracts import Arg
from ..launch import unavailable
from ..registry import EXACT, Case, Implementation, Op
from .reference import compressor_insert_ref
from .window_insert import AXES, CACHE, SIZES, check_rows, insert_inputs, insert_rows_triton


def compressor_insert(
    latent: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    ratio: int,
    *,
    implementation: str | None = None,
) -> None:
    """Store the latent of each group of `ratio` tokens in its slot of the compressed cache.

    Axes: T rows of latent, S slots (S <= T), L positions given (S <= L), B pages, P rows a page, M
    positions in the table.

    Args:
        latent: bfloat16 [T, 512], normalised, not rotated; read only where a group closes.
        cache: uint8 [B, P, 584], each page dense, pages `stride(0)` bytes apart; written in place.
        slots: int64 [S], compressed rows' slots, each in [0, B*P); negative: not stored. Two tokens of
            one group may name the same slot, since only the closing one is stored.
        positions: int64 [L], tokens, each in [0, M) where the slot is not negative.
        cos_sin: float32 [M, 64]: 32 cosines then 32 sines.
        ratio: tokens a group, at least 1. Token t closes a group iff (position + 1) % ratio == 0.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        None. Stored rows hold 448 codes, 64 dimensions rotated at position // ratio * ratio, 7 scale
        bytes and one zero byte; no other byte of the cache changes.

    Numerics: as `window_insert`.
    Graph safety: allocates nothing, does not synchronise, depends on no host value but `ratio`.
    Raises: ContractError on a wrong dtype, shape, stride or device, S > T or S > L, or ratio < 1.
    Source: model_spec sections 5 and 12; replaces `rope_quant_insert` for 584-byte records.
    """
    axes = OP.check(latent=latent, cache=cache, slots=slots, positions=positions, cos_sin=cos_sin)
    check_rows(OP.name, axes, "latent")
    if ratio < 1:
        raise ContractError(f"{OP.name}: ratio is {ratio}, must be at least 1")
    OP.choose(cache.device, implementation)(latent, cache, slots, positions, cos_sin, ratio)


def _inputs(sizes, generator, device):
    return insert_inputs(sizes, generator, device, "latent") | {"ratio": sizes["ratio"]}


OP = Op(
    name="compressor_insert",
    summary="Rotate, quantise and store compressed rows where a group of tokens closes.",
    axes=AXES,
    inputs=(
        Arg("latent", "T 512", (torch.bfloat16,)),
        CACHE,
        Arg("slots", "S", (torch.int64,)),
        Arg("positions", "L", (torch.int64,)),
        Arg("cos_sin", "M 64", (torch.float32,)),
    ),
    outputs=(),
    reference=compressor_insert_ref,
    implementations=(Implementation("triton", insert_rows_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"cache": EXACT},
    cases=tuple(
        Case(f"{name}_r{ratio}", sizes | {"ratio": ratio}, _inputs) for name, sizes in SIZES.items() for ratio in (1, 2)
    ),
    bytes_moved=lambda s: s["S"] * 16 + s["S"] // s["ratio"] * (1024 + 584 + 256),
    flops=lambda s: s["S"] // s["ratio"] * (512 * 2 + 32 * 6),
    mutates=("cache",),
    replaces="vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache.rope_quant_insert",
    source="12",
)
