# SPDX-License-Identifier: Apache-2.0
"""Gate the engram value into the four residual streams.

Each stream compares itself with its own key; a signed square root spreads the small products before
the sigmoid. All streams share one value.

A Triton program owns one stream of one token and reads it twice, for the three sums and for the result.
"""

import torch

from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import engram_gate_ref

_BLOCK, _WARPS = 1024, 4


@triton.jit
def _engram_gate_kernel(
    streams_ptr, kv_ptr, q_weight_ptr, k_weight_ptr, live_ptr, out_ptr,
    stride_streams_tok, stride_streams, stride_kv_tok, stride_q_weight, stride_k_weight, eps, clamp, root_dim,
    D: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x_ptr = streams_ptr + token * stride_streams_tok + stream * stride_streams
    key_ptr = kv_ptr + token * stride_kv_tok + stream * D
    value_ptr = kv_ptr + token * stride_kv_tok + 4 * D
    dots = tl.zeros([BLOCK], tl.float32)
    x_squares = tl.zeros([BLOCK], tl.float32)
    key_squares = tl.zeros([BLOCK], tl.float32)
    for base in range(0, D, BLOCK):
        d = base + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + d, d < D, other=0.0).to(tl.float32)
        key = tl.load(key_ptr + d, d < D, other=0.0).to(tl.float32)
        q_weight = tl.load(q_weight_ptr + stream * stride_q_weight + d, d < D, other=0.0).to(tl.float32)
        k_weight = tl.load(k_weight_ptr + stream * stride_k_weight + d, d < D, other=0.0).to(tl.float32)
        dots += x * q_weight * k_weight * key
        x_squares += x * x
        key_squares += key * key
    dot = tl.sum(dots, 0) * tl.rsqrt(tl.sum(x_squares, 0) / D + eps) * tl.rsqrt(tl.sum(key_squares, 0) / D + eps)
    dot = dot / root_dim
    root = tl.sqrt(tl.maximum(tl.abs(dot), clamp, propagate_nan=tl.PropagateNan.ALL))
    gate = 1.0 / (1.0 + tl.exp(tl.where(dot < 0, root, -root)))
    if MASKED:
        gate = tl.where(tl.load(live_ptr + token) != 0, gate, 0.0)
    out_ptr += (token * 4 + stream) * D
    for base in range(0, D, BLOCK):
        d = base + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + d, d < D, other=0.0).to(tl.float32)
        value = tl.load(value_ptr + d, d < D, other=0.0).to(tl.float32)
        tl.store(out_ptr + d, (x + gate * value).to(tl.bfloat16), d < D)


def _engram_gate_triton(streams, kv, q_weight, k_weight, live, eps, clamp=1e-6):
    tokens, count, dim = streams.shape
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if tokens:
        _engram_gate_kernel[(tokens, count)](
            streams, kv, q_weight, k_weight, streams if live is None else live.view(torch.uint8), out,
            streams.stride(0), streams.stride(1), kv.stride(0), q_weight.stride(0), k_weight.stride(0),
            eps, clamp, dim**0.5, D=dim, MASKED=live is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )
    return out


COMPILES = tuple(
    Launch(
        _engram_gate_kernel,
        {
            "streams_ptr": "*bf16:16", "kv_ptr": "*bf16:16", "q_weight_ptr": "*bf16:16", "k_weight_ptr": "*bf16:16",
            "live_ptr": "*u8:16", "out_ptr": "*bf16:16", "stride_streams_tok": "i32:16", "stride_streams": "i32:16",
            "stride_kv_tok": "i32:16", "stride_q_weight": "i32:16", "stride_k_weight": "i32:16", "eps": "fp32",
            "clamp": "fp32", "root_dim": "fp32",
        },
        {"D": 5120, "MASKED": masked, "BLOCK": _BLOCK},
        num_warps=_WARPS,
    )
    for masked in (False, True)
)


def engram_gate(
    streams: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    live: torch.Tensor | None,
    eps: float,
    clamp: float = 1e-6,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Add gate_j * value to stream j.

    gate_j = sigmoid(sign(d_j) sqrt(max(|d_j|, clamp))), d_j = sum(X_j q_j k_j key_j) / (rms(X_j) rms(key_j) sqrt(D)).

    Axes: T tokens, D hidden size.

    Args:
        streams: bfloat16 [T, 4, D].
        kv: bfloat16 [T, 5*D]: the four keys, then the value; `wkv` times the 24 looked-up rows.
        q_weight, k_weight: bfloat16 [4, D].
        live: bool [T]; False (image tokens) shuts the gate. None: all are live.
        eps: added to each mean square; 1e-20 in the released model.
        clamp: least magnitude under the root.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, 4, D], newly allocated; a token that is not live keeps its bits if its value is finite.

    Numerics: float32, one rounding. d = 0 counts as positive, as in upstream's kernel. A token has the same
    bits alone and in any batch.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 8; replaces `_fused_engram_post_wkv_kernel`.
    """
    OP.check(streams=streams, kv=kv, q_weight=q_weight, k_weight=k_weight, live=live)
    return OP.choose(streams.device, implementation)(streams, kv, q_weight, k_weight, live, eps, clamp)


def _inputs(sizes, generator, device):
    tokens, dim = sizes["T"], sizes["D"]
    return {
        "streams": normal(generator, tokens, 4, dim, device=device),
        "kv": normal(generator, tokens, 5 * dim, device=device),
        "q_weight": normal(generator, 4, dim, device=device),
        "k_weight": normal(generator, 4, dim, device=device),
        "live": (torch.rand(tokens, generator=generator) < 0.8).to(device) if sizes["mask"] else None,
        "eps": 1e-20,
        "clamp": 1e-6,
    }


OP = Op(
    name="engram_gate",
    summary="Gate the engram value into the four residual streams.",
    axes={"T": "tokens", "D": "hidden size"},
    inputs=(
        Arg("streams", "T 4 D", (torch.bfloat16,)),
        Arg("kv", "T 5*D", (torch.bfloat16,)),
        Arg("q_weight", "4 D", (torch.bfloat16,)),
        Arg("k_weight", "4 D", (torch.bfloat16,)),
        Arg("live", "T", (torch.bool,), optional=True),
    ),
    outputs=(Arg("streams", "T 4 D", (torch.bfloat16,)),),
    reference=engram_gate_ref,
    implementations=(Implementation("triton", _engram_gate_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"streams": Tolerance(2e-3, 4e-2)},
    cases=tuple(
        Case(f"t{t}_d{d}{'_mask' if mask else ''}", {"T": t, "D": d, "mask": mask}, _inputs)
        for t, d, mask in ((0, 256, True), (1, 5120, False), (65, 256, True), (33, 96, False))
    ),
    bytes_moved=lambda s: s["T"] * s["D"] * (8 + 10 + 8) + s["D"] * 16,
    flops=lambda s: s["T"] * s["D"] * 4 * 10,
    replaces="vllm.models.deepseek_v41.common.engram._fused_engram_post_wkv_kernel",
    source="8",
)
