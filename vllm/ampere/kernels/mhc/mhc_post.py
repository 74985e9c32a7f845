# SPDX-License-Identifier: Apache-2.0
"""Expand a sublayer's output into the four streams, and collapse the streams into one.

The two ends of a sublayer as ops of their own: upstream calls them apart from the fused boundary at an
engram layer, at a pipeline cut and before the final norm.

A Triton program owns 1024 dimensions of one token in all four streams.
"""

import torch

from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import mhc_collapse_ref, mhc_post_ref

_BLOCK, _WARPS = 1024, 4


@triton.jit
def load_sources(y_ptr, streams_ptr, token, d, stride_y_tok, stride_streams_tok, stride_streams, D: tl.constexpr):
    """float32 [BLOCK] each, at dimensions d of one token: the sublayer's output and the four streams before it."""
    x_ptr = streams_ptr + token * stride_streams_tok + d
    y = tl.load(y_ptr + token * stride_y_tok + d, d < D, other=0.0).to(tl.float32)
    x0 = tl.load(x_ptr, d < D, other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr + stride_streams, d < D, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + 2 * stride_streams, d < D, other=0.0).to(tl.float32)
    x3 = tl.load(x_ptr + 3 * stride_streams, d < D, other=0.0).to(tl.float32)
    return y, x0, x1, x2, x3


@triton.jit
def mixed_stream(comb_ptr, stride_comb, post_ptr, stride_post, k, y, x0, x1, x2, x3):
    """bfloat16 [BLOCK]: stream k after the sublayer, of one token whose coefficients the pointers begin."""
    mixed = tl.load(comb_ptr + k) * x0
    mixed += tl.load(comb_ptr + stride_comb + k) * x1
    mixed += tl.load(comb_ptr + 2 * stride_comb + k) * x2
    mixed += tl.load(comb_ptr + 3 * stride_comb + k) * x3
    mixed += tl.load(post_ptr + k * stride_post) * y
    return mixed.to(tl.bfloat16)


@triton.jit
def _mhc_post_kernel(
    y_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr,
    stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
    D: tl.constexpr, BLOCK: tl.constexpr,
):
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y, x0, x1, x2, x3 = load_sources(
        y_ptr, streams_ptr, token, d, stride_y_tok, stride_streams_tok, stride_streams, D
    )
    comb_ptr += token * stride_comb_tok
    post_ptr += token * stride_post_tok
    for k in tl.static_range(4):
        stream = mixed_stream(comb_ptr, stride_comb, post_ptr, stride_post, k, y, x0, x1, x2, x3)
        tl.store(out_ptr + (token * 4 + k) * D + d, stream, d < D)


def _mhc_post_triton(y, streams, post, comb):
    tokens, dim = y.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=y.device)
    if tokens:
        _mhc_post_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
            y, streams, post, comb, out, y.stride(0), streams.stride(0), streams.stride(1),
            post.stride(0), post.stride(1), comb.stride(0), comb.stride(1), D=dim, BLOCK=_BLOCK, num_warps=_WARPS,
        )
    return out


@triton.jit
def _mhc_collapse_kernel(
    streams_ptr, mix_ptr, out_ptr, stride_streams_tok, stride_streams, stride_mix_tok,
    D: tl.constexpr, BLOCK: tl.constexpr,
):
    token, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(4):
        x = tl.load(streams_ptr + token * stride_streams_tok + j * stride_streams + d, d < D, other=0.0)
        total += tl.load(mix_ptr + token * stride_mix_tok + j) * x.to(tl.float32)
    tl.store(out_ptr + token * D + d, total.to(tl.bfloat16), d < D)


def _mhc_collapse_triton(streams, mix):
    tokens, _, dim = streams.shape
    out = torch.empty(tokens, dim, dtype=streams.dtype, device=streams.device)
    if tokens:
        _mhc_collapse_kernel[(tokens, triton.cdiv(dim, _BLOCK))](
            streams, mix, out, streams.stride(0), streams.stride(1), mix.stride(0),
            D=dim, BLOCK=_BLOCK, num_warps=_WARPS,
        )
    return out


_STREAMS = {
    "streams_ptr": "*bf16:16", "stride_streams_tok": "i32:16", "stride_streams": "i32:16", "out_ptr": "*bf16:16",
}
COMPILES = (
    Launch(
        _mhc_post_kernel,
        _STREAMS | {
            "y_ptr": "*bf16:16", "post_ptr": "*fp32:16", "comb_ptr": "*fp32:16", "stride_y_tok": "i32:16",
            "stride_post_tok": "i32", "stride_post": "i32", "stride_comb_tok": "i32:16", "stride_comb": "i32",
        },
        {"D": 5120, "BLOCK": _BLOCK},
        num_warps=_WARPS,
    ),
    Launch(
        _mhc_collapse_kernel,
        _STREAMS | {"mix_ptr": "*fp32:16", "stride_mix_tok": "i32"},
        {"D": 5120, "BLOCK": _BLOCK},
        num_warps=_WARPS,
    ),
)


def mhc_post(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, *, implementation: str | None = None
) -> torch.Tensor:
    """Add a sublayer's output to the mixed streams: X'_k = post_k y + sum_j comb[j, k] X_j.

    Axes: T tokens, D hidden size.

    Args:
        y: bfloat16 [T, D]; the sublayer's output.
        streams: bfloat16 [T, 4, D]; X, the streams before the sublayer.
        post: float32 [T, 4, 1].
        comb: float32 [T, 4, 4], row: source stream, column: destination.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, 4, D], newly allocated.

    Numerics: float32, streams in ascending order, then the output; one rounding.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 4 (expand); replaces `mhc_post_tilelang`.
    """
    MHC_POST.check(y=y, streams=streams, post=post, comb=comb)
    return MHC_POST.choose(y.device, implementation)(y, streams, post, comb)


def mhc_collapse(streams: torch.Tensor, mix: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Weighted sum of the streams: sum_j mix_j X_j.

    Axes: T tokens, D hidden size.

    Args:
        streams: bfloat16 [T, 4, D].
        mix: float32 [T, 4]; the `pre` of the sublayer before.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, D], newly allocated.

    Numerics: float32, streams in ascending order; one rounding.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 4 (collapse); replaces `hc_collapse_triton`.
    """
    MHC_COLLAPSE.check(streams=streams, mix=mix)
    return MHC_COLLAPSE.choose(streams.device, implementation)(streams, mix)


def post_inputs(sizes, generator, device):
    """Random arguments of `mhc_post`."""
    tokens, dim = sizes["T"], sizes["D"]
    return {
        "y": normal(generator, tokens, dim, device=device),
        "streams": normal(generator, tokens, 4, dim, device=device),
        "post": 2 * normal(generator, tokens, 4, 1, dtype=torch.float32, device=device).sigmoid(),
        "comb": normal(generator, tokens, 4, 4, dtype=torch.float32, device=device).softmax(-2),
    }


def _collapse_inputs(sizes, generator, device):
    given = post_inputs(sizes, generator, device)
    return {"streams": given["streams"], "mix": given["post"].flatten(1)}


BF16, FP32 = (torch.bfloat16,), (torch.float32,)
AXES = {"T": "tokens", "D": "hidden size"}
POST_INPUTS = (
    Arg("y", "T D", BF16),
    Arg("streams", "T 4 D", BF16),
    Arg("post", "T 4 1", FP32),
    Arg("comb", "T 4 4", FP32),
)
_SIZES = ((0, 256), (1, 5120), (63, 256), (4097, 64))
ROUNDED_ONCE = Tolerance(2e-3, 4e-2)

MHC_POST = Op(
    name="mhc_post",
    summary="Expand a sublayer's output into the four mixed streams.",
    axes=AXES,
    inputs=POST_INPUTS,
    outputs=(Arg("streams", "T 4 D", BF16),),
    reference=mhc_post_ref,
    implementations=(Implementation("triton", _mhc_post_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"streams": ROUNDED_ONCE},
    cases=tuple(Case(f"t{t}_d{d}", {"T": t, "D": d}, post_inputs) for t, d in _SIZES),
    bytes_moved=lambda s: s["T"] * (s["D"] * 18 + 80),
    flops=lambda s: s["T"] * s["D"] * 4 * 10,
    replaces="vllm.model_executor.kernels.mhc.tilelang.mhc_post_tilelang",
    source="4",
)

MHC_COLLAPSE = Op(
    name="mhc_collapse",
    summary="Weighted sum of the four streams.",
    axes=AXES,
    inputs=(Arg("streams", "T 4 D", BF16), Arg("mix", "T 4", FP32)),
    outputs=(Arg("collapsed", "T D", BF16),),
    reference=mhc_collapse_ref,
    implementations=(Implementation("triton", _mhc_collapse_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"collapsed": ROUNDED_ONCE},
    cases=tuple(Case(f"t{t}_d{d}", {"T": t, "D": d}, _collapse_inputs) for t, d in _SIZES),
    bytes_moved=lambda s: s["T"] * (s["D"] * 10 + 16),
    flops=lambda s: s["T"] * s["D"] * 8,
    replaces="vllm.model_executor.kernels.mhc.triton.hc_collapse_triton",
    source="4",
)

OPS = (MHC_POST, MHC_COLLAPSE)
