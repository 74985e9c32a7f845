# SPDX-License-Identifier: Apache-2.0
"""Undo the rotary embedding of the attention output.

Key and value are the same rotated vector, so the output of every head carries the rotation of its
keys relative to position 0. Rotating the last 64 dimensions back by the query's position leaves the
relative one. Takes the place of upstream's fused kernel called with `quantize=False`, which SM80
cannot compile: its fp8 branch is lowered even when it is not taken.
"""

import torch

from ...testing.inputs import integers, normal, rope_table
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from ..triton_rope import load_pairs, load_turn, rotate_pairs
from .reference import inverse_rope_ref

_BLOCK_H = 8


@triton.jit(do_not_specialize_on_alignment=["positions_ptr"])
def _inverse_rope_kernel(
    o_ptr,
    positions_ptr,
    cos_sin_ptr,
    out_ptr,
    stride_o_tok,
    stride_o_head,
    stride_cos_sin,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One program owns `BLOCK_H` heads of one token; `out_ptr` is dense."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    offs_h = (tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    source = o_ptr + token * stride_o_tok + offs_h.to(tl.int64) * stride_o_head
    target = out_ptr + (token * HEADS + offs_h) * 512
    offs_d = tl.arange(0, 512)[None, :]
    copied = (offs_h < HEADS) & (offs_d < 448)
    tl.store(target + offs_d, tl.load(source + offs_d, mask=copied, other=0.0), mask=copied)
    offs_r = tl.arange(0, 64)[None, :]
    even, odd = load_pairs(source + 448 + offs_r, offs_h < HEADS, BLOCK_H)
    cos, sin = load_turn(cos_sin_ptr + tl.load(positions_ptr + token) * stride_cos_sin)
    turned = rotate_pairs(even, odd, cos[None, :], -sin[None, :])
    tl.store(target + 448 + offs_r, turned.to(tl.bfloat16), mask=offs_h < HEADS)


def _inverse_rope_triton(o, positions, cos_sin):
    tokens, heads, _ = o.shape
    out = torch.empty(o.shape, dtype=o.dtype, device=o.device)
    if tokens * heads:
        _inverse_rope_kernel[(tokens * triton.cdiv(heads, _BLOCK_H),)](
            o,
            positions,
            cos_sin,
            out,
            o.stride(0),
            o.stride(1),
            cos_sin.stride(0),
            HEADS=heads,
            BLOCK_H=_BLOCK_H,
            enable_fp_fusion=False,
        )
    return out


COMPILES = tuple(
    Launch(
        _inverse_rope_kernel,
        {
            "o_ptr": "*bf16:16",
            "positions_ptr": "*i64",
            "cos_sin_ptr": "*fp32:16",
            "out_ptr": "*bf16:16",
            "stride_o_tok": "i32:16",
            "stride_o_head": "i32:16",
            "stride_cos_sin": "i32:16",
        },
        {"HEADS": heads, "BLOCK_H": _BLOCK_H},
        fp_fusion=False,
    )
    for heads in (8, 64)
)


def inverse_rope(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Rotate the last 64 dimensions of each head back by the position of its token.

    Axes: T tokens, H query heads on this rank, M positions in the table.

    Args:
        o: bfloat16 [T, H, 512], last dimension contiguous; attention output.
        positions: int64 [T], tokens, each in [0, M).
        cos_sin: float32 [M, 64]: 32 cosines then 32 sines.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, H, 512], newly allocated; the first 448 dimensions are the input's bits.

    Numerics: float32 rotation, one rounding to bfloat16.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 5; replaces `fused_inv_rope_fp8_quant(quantize=False)`.
    """
    OP.check(o=o, positions=positions, cos_sin=cos_sin)
    return OP.choose(o.device, implementation)(o, positions, cos_sin)


def _inputs(sizes, generator, device):
    return {
        "o": normal(generator, sizes["T"], sizes["H"], 512, device=device),
        "positions": integers(generator, 0, sizes["M"], sizes["T"], device=device),
        "cos_sin": rope_table(sizes["M"], device=device),
    }


OP = Op(
    name="inverse_rope",
    summary="Rotate the last 64 dimensions of the attention output back by the query position.",
    axes={"T": "tokens", "H": "query heads on this rank", "M": "positions in the rotary table"},
    inputs=(
        Arg("o", "T H 512", (torch.bfloat16,)),
        Arg("positions", "T", (torch.int64,)),
        Arg("cos_sin", "M 64", (torch.float32,)),
    ),
    outputs=(Arg("o", "T H 512", (torch.bfloat16,)),),
    reference=inverse_rope_ref,
    implementations=(Implementation("triton", _inverse_rope_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"o": Tolerance(2e-3, 4e-2)},
    cases=tuple(Case(f"t{t}_h{h}", {"T": t, "H": h, "M": 4096}, _inputs) for t, h in ((0, 8), (1, 8), (6, 64), (129, 16))),
    bytes_moved=lambda s: s["T"] * s["H"] * 512 * 4 + s["T"] * (8 + 256),
    flops=lambda s: s["T"] * s["H"] * 32 * 6,
    replaces="vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant",
    source="5",
)
