# SPDX-License-Identifier: Apache-2.0
"""Index scores of a prefill chunk against keys gathered into one array.

logit = key_scale * sum_h w_h * relu(q_h . k). The ReLU acts on each head before the sum, so the heads
cannot be added first. Upstream calls DeepGEMM, which has no SM80 code.

A Triton program owns eight consecutive query tokens and every n-th tile of their keys. It decodes the queries once
and each tile once for the eight, which see runs of different lengths from the same start; where two requests meet in a
program, it walks over the keys of one and then over those of the other.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, aligned_rows, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import mqa_logits_ref
from .score_tile import (
    SHARED_REASON,
    fill_unseen,
    head_block,
    load_keys,
    load_queries,
    load_weights,
    programs_a_row,
    score_tile,
    walk_of,
    words_are_aligned,
)

_TOKENS, _KEYS, _WARPS, _STAGES = 8, 128, 4, 1
# Several for each that a card holds at once, since tokens see unequal runs.
_PROGRAMS_PER_MULTIPROCESSOR = 32


@triton.jit(do_not_specialize=["tokens", "width"])
def _mqa_logits_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, starts_ptr, ends_ptr, out_ptr,
    stride_weights_row, stride_key, stride_out_row, tokens, width,
    N: tl.constexpr, HEADS: tl.constexpr, ALIGNED: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS
    starts, counts, q, weights = (), (), (), ()
    for i in tl.static_range(TOKENS):
        there = row + i < tokens
        start = tl.load(starts_ptr + row + i, there, other=0)
        starts = starts + (start,)
        counts = counts + (tl.maximum(tl.load(ends_ptr + row + i, there, other=0) - start, 0),)
        q = q + (load_queries(q_ptr, row + i, there, N, HEADS, ALIGNED),)
        weights = weights + (load_weights(weights_ptr + (row + i) * stride_weights_row, there, N, HEADS),)
    out_ptr += row * stride_out_row
    offset, step = tl.program_id(1) * KEYS, tl.num_programs(1) * KEYS
    for lead in range(TOKENS):
        start, seen, columns = walk_of(lead, starts, counts, TOKENS)
        for base in range(offset, columns, step):
            column = base + tl.arange(0, KEYS)
            key = start.to(tl.int64) + column
            scale = tl.load(scales_ptr + key, column < columns, other=0.0)
            keys = load_keys(keys_ptr + key * stride_key, column < columns, KEYS, ALIGNED)
            for i in tl.static_range(TOKENS):
                score = score_tile(q[i], weights[i], keys, scale)
                tl.store(out_ptr + i * stride_out_row + column, score, column < seen[i])
    for i in tl.static_range(TOKENS):
        count = tl.where(row + i < tokens, counts[i], width)
        fill_unseen(out_ptr + i * stride_out_row, count, offset, step, width, KEYS)


def _mqa_logits_triton(q, weights, keys, key_scales, starts, ends, width):
    tokens, heads = weights.shape
    out = aligned_rows(weights, tokens, width)
    if out.numel():
        blocks = triton.cdiv(tokens, _TOKENS)
        programs = programs_a_row(q.device, blocks, triton.cdiv(width, _KEYS), _PROGRAMS_PER_MULTIPROCESSOR)
        aligned = words_are_aligned(q, 0) and words_are_aligned(keys, keys.stride(0))
        _mqa_logits_kernel[(blocks, programs)](
            q.view(torch.uint8), weights, keys.view(torch.uint8), key_scales, starts, ends, out,
            weights.stride(0), keys.stride(0), out.stride(0), tokens, width,
            N=heads, HEADS=head_block(heads), ALIGNED=aligned, TOKENS=_TOKENS, KEYS=_KEYS,
            num_warps=_WARPS, num_stages=_STAGES,
        )
    return out


COMPILES = tuple(
    Launch(
        _mqa_logits_kernel,
        {
            "q_ptr": "*u8:16", "weights_ptr": "*fp32:16", "keys_ptr": "*u8:16", "scales_ptr": "*fp32:16",
            "starts_ptr": "*i32:16", "ends_ptr": "*i32:16", "out_ptr": "*fp32:16", "stride_weights_row": "i32:16",
            "stride_key": "i32:16", "stride_out_row": "i32:16", "tokens": "i32",
            "width": "i32",
        },
        {"N": heads, "HEADS": head_block(heads), "ALIGNED": True, "TOKENS": _TOKENS, "KEYS": _KEYS},
        num_warps=_WARPS,
        num_stages=_STAGES,
        shared_reason=SHARED_REASON,
    )
    for heads in (32, 8)
)


def mqa_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scales: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Score each query token against its own run of the gathered keys.

    Axes: M query tokens, N index heads, S gathered keys of all requests of the chunk.

    Args:
        q: float8_e4m3fn [M, N, 128]; codes of `query_rope_quant`.
        weights: float32 [M, N]; every scale of the query folded in.
        keys: float8_e4m3fn [S, 128]; keys no token sees may hold anything.
        key_scales: float32 [S].
        starts: int32 [M]; row of `keys` that is column 0 of the token, in [0, S].
        ends: int32 [M]; one past the last key the token sees; at or below `starts`: it sees none.
        width: columns of the result, keys; at least the longest ends - starts.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 [M, width]: column j of a token is key starts + j; columns from ends - starts on are -inf.

    Numerics: products and sums in float32. A token has the same bits alone and in any batch. A NaN key
    gives NaN in its own column only.
    Graph safety: allocates its result; the reference reads starts and ends on the host.
    Raises: ContractError on a wrong dtype, shape, stride or device; the reference also if width is too small.
    Source: model_spec sections 5 and 12; replaces `fp8_fp4_mqa_logits`.
    """
    OP.check(q=q, weights=weights, keys=keys, key_scales=key_scales, starts=starts, ends=ends)
    return OP.choose(q.device, implementation)(q, weights, keys, key_scales, starts, ends, width)


def _inputs(sizes, generator, device):
    tokens, count = sizes["M"], sizes["S"]
    starts = integers(generator, 0, 2, tokens, dtype=torch.int32).sort().values * (count // 3)
    ends = (starts + integers(generator, 0, count // 3 + 1, tokens, dtype=torch.int32)).int()
    return {
        "q": normal(generator, tokens, sizes["N"], 128, dtype=torch.float8_e4m3fn, device=device),
        "weights": normal(generator, tokens, sizes["N"], dtype=torch.float32, device=device),
        "keys": normal(generator, count, 128, dtype=torch.float8_e4m3fn, device=device),
        "key_scales": torch.exp2(integers(generator, -8, 3, count).float()).to(device),
        "starts": starts.to(device),
        "ends": ends.to(device),
        "width": count,
    }


OP = Op(
    name="mqa_logits",
    summary="Index scores of a prefill chunk against its gathered keys.",
    axes={"M": "query tokens", "N": "index heads", "S": "gathered keys"},
    inputs=(
        Arg("q", "M N 128", (torch.float8_e4m3fn,), contiguous="full"),
        Arg("weights", "M N", (torch.float32,)),
        Arg("keys", "S 128", (torch.float8_e4m3fn,)),
        Arg("key_scales", "S", (torch.float32,)),
        Arg("starts", "M", (torch.int32,)),
        Arg("ends", "M", (torch.int32,)),
    ),
    outputs=(Arg("logits", "M W", (torch.float32,)),),
    reference=mqa_logits_ref,
    implementations=(Implementation("triton", _mqa_logits_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"logits": Tolerance(1e-5, 1e-4)},
    cases=tuple(
        Case(f"m{m}_n{n}_s{s}", {"M": m, "N": n, "S": s}, _inputs)
        for m, n, s in ((0, 8, 30), (1, 32, 30), (17, 8, 700), (65, 32, 300))
    ),
    bytes_moved=lambda s: s["M"] * (s["N"] * 132 + s["S"] * 4) + s["S"] * 132,
    flops=lambda s: s["M"] * s["S"] * s["N"] * (2 * 128 + 3),
    replaces="vllm.utils.deep_gemm.fp8_fp4_mqa_logits",
    source="5",
)
