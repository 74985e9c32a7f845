# SPDX-License-Identifier: Apache-2.0
"""Merge the partial results of attention split over its keys, and count the sink once.

Each split brings its output divided by its own denominator, and the logarithm of that denominator:

    o_h = sum_s e^(lse_sh - m) o_sh / (sum_s e^(lse_sh - m) + e^(sink_h - m))
"""

import torch

from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import merge_attn_states_ref

_LOWEST = tl.constexpr(-1e30)
# Splits of one pass; a decode step never has more.
_MAX_BLOCK_S = 64
# Above this many splits a program has 64 dimensions, below three one warp (raced on a card).
_MANY_SPLITS = 16


@triton.jit(do_not_specialize=["stride_lse_split", "splits"])
def _merge_attn_states_kernel(
    partial_ptr,
    lse_ptr,
    sink_ptr,
    out_ptr,
    stride_partial_split,
    stride_partial_tok,
    stride_partial_head,
    stride_lse_split,
    stride_lse_tok,
    stride_out_tok,
    stride_out_head,
    splits,
    HEADS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program merges a part of one token's head: a running soft-max over blocks of splits, started by the sink."""
    token = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    partial_ptr += token * stride_partial_tok + head * stride_partial_head
    sink = tl.load(sink_ptr + head)
    peak = tl.maximum(sink, _LOWEST)
    total = tl.exp(sink - peak)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, BLOCK_S):
        split = (first + tl.arange(0, BLOCK_S)).to(tl.int64)
        exists = split < splits
        # Not masked by what counts, which would have to be read first.
        part_row = partial_ptr + (split * stride_partial_split)[:, None] + offs_d[None, :]
        part = tl.load(part_row, mask=exists[:, None], other=0.0)
        lse_row = lse_ptr + split * stride_lse_split + token * stride_lse_tok + head
        lse = tl.load(lse_row, mask=exists, other=-float("inf"))
        counts = lse != -float("inf")
        lse = tl.where(counts, lse, _LOWEST)
        higher = tl.maximum(peak, tl.max(lse, 0))
        weight = tl.where(counts, tl.exp(lse - higher), 0.0)
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(tl.where(counts[:, None], part * weight[:, None], 0.0), 0)
        peak = higher
    # Nothing at all: no split counts and there is no sink.
    merged = acc / tl.where(total == 0.0, 1.0, total)
    out_row = out_ptr + token * stride_out_tok + head * stride_out_head
    tl.store(out_row + offs_d, merged.to(tl.bfloat16))


def _block_s(splits: int) -> int:
    return min(_MAX_BLOCK_S, triton.next_power_of_2(max(2, splits)))


def _tile(block_s: int) -> tuple[int, int]:
    """Dimensions and warps of a program."""
    return 64 if block_s > _MANY_SPLITS else 128, 1 if block_s == 2 else 2


def _merge_attn_states_triton(partial, lse, sink, out=None):
    splits, tokens, heads, dim = partial.shape
    if out is None:
        out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16, device=partial.device)
    block_s = _block_s(splits)
    block_d, warps = _tile(block_s)
    if tokens * heads:
        _merge_attn_states_kernel[(tokens * heads, dim // block_d)](
            partial,
            lse,
            sink,
            out,
            *partial.stride()[:3],
            *lse.stride()[:2],
            *out.stride()[:2],
            splits,
            HEADS=heads,
            BLOCK_S=block_s,
            BLOCK_D=block_d,
            num_warps=warps,
        )
    return out


_STRIDES = ("partial_split", "partial_tok", "partial_head", "out_tok", "out_head")
COMPILES = tuple(
    Launch(
        _merge_attn_states_kernel,
        {
            "partial_ptr": "*fp32:16",
            "lse_ptr": "*fp32:16",
            "sink_ptr": "*fp32:16",
            "out_ptr": "*bf16:16",
            **{f"stride_{name}": "i32:16" for name in _STRIDES},
            "stride_lse_split": "i32",
            "stride_lse_tok": "i32",
            "splits": "i32",
        },
        {"HEADS": heads, "BLOCK_S": block_s, "BLOCK_D": _tile(block_s)[0]},
        num_warps=_tile(block_s)[1],
    )
    for heads in (8, 64)
    for block_s in (2, 16, _MAX_BLOCK_S)
)


def merge_attn_states(
    partial: torch.Tensor,
    lse: torch.Tensor,
    sink: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Merge the splits of each token and head.

    Axes: S splits, T tokens, H query heads on this rank.

    Args:
        partial: float32 [S, T, H, 512], output of each split over its own keys, normalised.
        lse: float32 [S, T, H], log of the sum of e^logit over the split's keys; -inf: the split is empty, and
            whatever `partial` holds there does not count.
        sink: float32 [H], logit of the sink; finite or -inf (no sink).
        out: bfloat16 [T, H, 512], written in place of a new tensor.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, H, 512]; zeros where every split is empty, under any sink.

    Numerics: float32, one rounding to bfloat16. The order of the splits changes the result by rounding only.
    Graph safety: allocates its result unless `out` is given, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 5.
    """
    OP.check(partial=partial, lse=lse, sink=sink, out=out)
    return OP.choose(partial.device, implementation)(partial, lse, sink, out)


def _inputs(sizes, generator, device):
    splits, tokens, heads = sizes["S"], sizes["T"], sizes["H"]
    lse = normal(generator, splits, tokens, heads, dtype=torch.float32, scale=3.0)
    lse[torch.rand(lse.shape, generator=generator) < 0.2] = -torch.inf
    partial = normal(generator, splits, tokens, heads, 512, dtype=torch.float32)
    partial[lse == -torch.inf] = torch.nan
    return {
        "partial": partial.to(device),
        "lse": lse.to(device),
        "sink": normal(generator, heads, dtype=torch.float32, device=device),
    }


OP = Op(
    name="merge_attn_states",
    summary="Merge the partial results of attention split over its keys, and count the sink once.",
    axes={"S": "splits", "T": "tokens", "H": "query heads on this rank"},
    inputs=(
        Arg("partial", "S T H 512", (torch.float32,)),
        Arg("lse", "S T H", (torch.float32,)),
        Arg("sink", "H", (torch.float32,)),
        Arg("out", "T H 512", (torch.bfloat16,), optional=True),
    ),
    outputs=(Arg("o", "T H 512", (torch.bfloat16,)),),
    reference=merge_attn_states_ref,
    implementations=(Implementation("triton", _merge_attn_states_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"o": Tolerance(2e-3, 4e-2)},
    cases=tuple(
        Case(f"s{s}_t{t}_h{h}", {"S": s, "T": t, "H": h}, _inputs)
        for s, t, h in ((1, 1, 8), (4, 0, 8), (5, 7, 16), (16, 2, 64))
    ),
    bytes_moved=lambda s: s["T"] * s["H"] * (s["S"] * (512 * 4 + 4) + 512 * 2),
    flops=lambda s: s["T"] * s["H"] * s["S"] * 512 * 2,
    source="5",
)
