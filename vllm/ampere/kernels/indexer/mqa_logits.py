# SPDX-License-Identifier: Apache-2.0
"""Index scores of a prefill chunk against keys gathered into one array.

logit = key_scale * sum_h w_h * relu(q_h . k). The ReLU acts on each head before the sum, so the heads
cannot be added first. Upstream calls DeepGEMM, which has no SM80 code.

A Triton program owns one query token and one tile of its keys, which it decodes for this token alone.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, aligned_rows, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import mqa_logits_ref
from .score_tile import head_block, load_queries, load_weights, score_tile

_KEYS, _WARPS, _STAGES = 64, 4, 2


@triton.jit(do_not_specialize=["width"])
def _mqa_logits_kernel(
    q_ptr, weights_ptr, keys_ptr, scales_ptr, starts_ptr, ends_ptr, out_ptr,
    stride_weights_row, stride_key, stride_out_row, width,
    N: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + row)
    count = tl.load(ends_ptr + row) - start
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    score = tl.full([KEYS], float("-inf"), tl.float32)
    if tl.program_id(1) * KEYS < count:
        q = load_queries(q_ptr, row, N, HEADS)
        weights = load_weights(weights_ptr + row * stride_weights_row, N, HEADS)
        key = (start + column).to(tl.int64)
        seen = column < count
        codes = tl.load(keys_ptr + key[:, None] * stride_key + tl.arange(0, 128)[None, :], seen[:, None], other=0)
        scale = tl.load(scales_ptr + key, seen, other=0.0)
        score = tl.where(seen, score_tile(q, weights, codes, scale), score)
    tl.store(out_ptr + row * stride_out_row + column, score, column < width)


def _mqa_logits_triton(q, weights, keys, key_scales, starts, ends, width):
    tokens, heads = weights.shape
    out = aligned_rows(weights, tokens, width)
    if out.numel():
        _mqa_logits_kernel[(tokens, triton.cdiv(width, _KEYS))](
            q.view(torch.uint8), weights, keys.view(torch.uint8), key_scales, starts, ends, out,
            weights.stride(0), keys.stride(0), out.stride(0), width,
            N=heads, HEADS=head_block(heads), KEYS=_KEYS, num_warps=_WARPS, num_stages=_STAGES,
        )
    return out


COMPILES = tuple(
    Launch(
        _mqa_logits_kernel,
        {
            "q_ptr": "*u8:16", "weights_ptr": "*fp32:16", "keys_ptr": "*u8:16", "scales_ptr": "*fp32:16",
            "starts_ptr": "*i32:16", "ends_ptr": "*i32:16", "out_ptr": "*fp32:16", "stride_weights_row": "i32:16",
            "stride_key": "i32:16", "stride_out_row": "i32:16", "width": "i32",
        },
        {"N": heads, "HEADS": head_block(heads), "KEYS": _KEYS},
        num_warps=_WARPS,
        num_stages=_STAGES,
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
