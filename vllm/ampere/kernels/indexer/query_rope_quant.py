# SPDX-License-Identifier: Apache-2.0
"""Rotate the index queries and quantise them to E4M3, with the scale folded into the head weights.

ReLU commutes with a positive factor, so the scale of a (token, head) needs no tensor of its own: it
multiplies the head's weight. Upstream's kernels write through an fp8e4nv pointer, which SM80 lacks.

A Triton program owns eight rows of 128; products are not fused with sums, so that it rounds as the reference does.
"""

import torch

from ...testing.inputs import integers, normal, rope_table
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..quantization.triton_codec import ue8m0_to_float
from ..registry import Case, Implementation, Op, Tolerance
from .reference import query_rope_quant_ref
from .rotate_quantize import rotate_quantize

_ROWS, _WARPS = 8, 2


@triton.jit(
    do_not_specialize=["stride_weights_tok", "rows"],
    do_not_specialize_on_alignment=["positions_ptr", "weights_ptr"],
)
def _query_rope_quant_kernel(
    q_ptr, positions_ptr, cos_sin_ptr, weights_ptr, codes_ptr, scaled_ptr,
    stride_q_tok, stride_q_head, stride_position, stride_weights_tok, softmax_scale, head_scale, rows,
    N: tl.constexpr, ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    token, head = row // N, row % N
    d = tl.arange(0, 128)[None, :]
    q = tl.load(q_ptr + (token * stride_q_tok + head * stride_q_head)[:, None] + d, live[:, None], other=0.0)
    position = tl.load(positions_ptr + token, live, other=0)
    codes, byte = rotate_quantize(q.to(tl.float32), position, live, cos_sin_ptr, stride_position, ROWS)
    tl.store(codes_ptr + row[:, None] * 128 + d, codes, live[:, None])
    weight = tl.load(weights_ptr + token * stride_weights_tok + head, live, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row, weight * ue8m0_to_float(byte) * softmax_scale * head_scale, live)


def _query_rope_quant_triton(q, positions, cos_sin, weights, softmax_scale, head_scale):
    codes = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    scaled = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    rows = weights.numel()
    if rows:
        _query_rope_quant_kernel[(triton.cdiv(rows, _ROWS),)](
            q, positions, cos_sin, weights, codes.view(torch.uint8), scaled,
            q.stride(0), q.stride(1), cos_sin.stride(0), weights.stride(0), softmax_scale, head_scale, rows,
            N=q.shape[1], ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False,
        )
    return codes, scaled


COMPILES = (
    Launch(
        _query_rope_quant_kernel,
        {
            "q_ptr": "*bf16:16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32:16", "weights_ptr": "*bf16",
            "codes_ptr": "*u8:16", "scaled_ptr": "*fp32:16", "stride_q_tok": "i32:16", "stride_q_head": "i32:16",
            "stride_position": "i32:16", "stride_weights_tok": "i32", "softmax_scale": "fp32",
            "head_scale": "fp32", "rows": "i32",
        },
        {"N": 32, "ROWS": _ROWS},
        num_warps=_WARPS,
        fp_fusion=False,
    ),
)


def query_rope_quant(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    weights: torch.Tensor,
    softmax_scale: float,
    head_scale: float,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the last 64 dimensions, quantise each head with one power-of-two scale, scale the weights.

    Axes: T tokens, N index heads, M positions in the table.

    Args:
        q: bfloat16 [T, N, 128], last dimension contiguous; index queries before the rotation.
        positions: int64 [T], tokens, each in [0, M).
        cos_sin: float32 [M, 64]: 32 cosines then 32 sines.
        weights: bfloat16 [T, N]; head weights before any scale.
        softmax_scale: 128^-0.5 in the released model.
        head_scale: N^-0.5 in the released model.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        codes: float8_e4m3fn [T, N, 128], newly allocated.
        weights: float32 [T, N]: weights * scale * softmax_scale * head_scale, multiplied in this order.

    Numerics: float32 rotation, rounded to bfloat16; scale 2^ceil(log2(max(amax, 1e-4) / 448)); codes
    rounded to nearest even. A NaN stays in its (token, head), whose products with the weight are not all finite.
    Graph safety: allocates its results, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec sections 3, 5 and 12; replaces `fused_indexer_q_rope_quant`.
    """
    OP.check(q=q, positions=positions, cos_sin=cos_sin, weights=weights)
    return OP.choose(q.device, implementation)(q, positions, cos_sin, weights, softmax_scale, head_scale)


def _inputs(sizes, generator, device):
    return {
        "q": normal(generator, sizes["T"], sizes["N"], 128, device=device),
        "positions": integers(generator, 0, sizes["M"], sizes["T"], device=device),
        "cos_sin": rope_table(sizes["M"], device=device),
        "weights": normal(generator, sizes["T"], sizes["N"], device=device),
        "softmax_scale": 128**-0.5,
        "head_scale": sizes["N"] ** -0.5,
    }


OP = Op(
    name="query_rope_quant",
    summary="Rotate index queries and quantise them to E4M3 with the scale folded into the head weights.",
    axes={"T": "tokens", "N": "index heads", "M": "positions in the rotary table"},
    inputs=(
        Arg("q", "T N 128", (torch.bfloat16,)),
        Arg("positions", "T", (torch.int64,)),
        Arg("cos_sin", "M 64", (torch.float32,)),
        Arg("weights", "T N", (torch.bfloat16,)),
    ),
    outputs=(Arg("codes", "T N 128", (torch.float8_e4m3fn,)), Arg("weights", "T N", (torch.float32,))),
    reference=query_rope_quant_ref,
    implementations=(Implementation("triton", _query_rope_quant_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"codes": Tolerance(2e-3, 0.3), "weights": Tolerance(1e-6, 1e-5)},
    cases=tuple(
        Case(f"t{t}_n{n}", {"T": t, "N": n, "M": 4096}, _inputs) for t, n in ((0, 8), (1, 32), (6, 32), (129, 8))
    ),
    bytes_moved=lambda s: s["T"] * (s["N"] * (128 * 3 + 2 + 4) + 8 + 256),
    flops=lambda s: s["T"] * s["N"] * (32 * 6 + 128 * 3),
    replaces="vllm.models.deepseek_v41.common.ops.fused_indexer_q_rope_quant",
    source="5",
)
