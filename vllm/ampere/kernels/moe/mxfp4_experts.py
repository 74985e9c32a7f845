# SPDX-License-Identifier: Apache-2.0
"""The routed experts on MXFP4 weights and bfloat16 activations.

Marlin, upstream's path on SM80, pads each rank's intermediate size to 128 (33% more weight at TP 8) and
repacks at load; this op reads the checkpoint's own layout.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..registry import Case, Op, Tolerance
from .reference import mxfp4_experts_ref


def mxfp4_experts(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    limit: float,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Sum over the chosen experts of weight * W2 (silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)).

    Axes: T tokens, K experts chosen for a token, E experts on this rank, G = D/32 and J = I/32 groups of
    32 of the hidden size D and of the intermediate size I.

    Args:
        x: bfloat16 [T, D].
        w13: uint8 [E, 2*I, D/2], MXFP4: I rows of W1 (gate), then I of W3 (up); low nibble is the even column.
        w13_scale: uint8 [E, 2*I, D/32], UE8M0.
        w2: uint8 [E, D, I/2], MXFP4.
        w2_scale: uint8 [E, D, I/32], UE8M0.
        topk_weights: float32 [T, K].
        topk_ids: int32 [T, K]; an id outside [0, E) is an expert of another rank and adds nothing.
        limit: clamp of the gate from above and of the up projection from both sides; 10 in the released model.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, D], newly allocated; zero for a token without an expert here.

    Numerics: float32 products and sums; the hidden activation is rounded to bfloat16 before W2; experts are
    added in ascending order in float32; one rounding at the end. A token has the same bits alone and in
    any batch.
    Graph safety: allocates its result; the reference reads the ids on the host.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 6; replaces `MarlinExperts`.
    """
    OP.check(
        x=x, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights, topk_ids=topk_ids
    )
    return OP.choose(x.device, implementation)(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, limit)


def _inputs(sizes, generator, device):
    tokens, experts, dim, inner, k = (sizes[axis] for axis in "TEDIK")

    def packed(*shape):
        return integers(generator, 0, 256, *shape, dtype=torch.uint8, device=device)

    def scales(*shape):
        return integers(generator, 118, 124, *shape, dtype=torch.uint8, device=device)

    order = torch.rand(tokens, experts + 2, generator=generator).argsort(-1)[:, :k]
    return {
        "x": normal(generator, tokens, dim, device=device),
        "w13": packed(experts, 2 * inner, dim // 2),
        "w13_scale": scales(experts, 2 * inner, dim // 32),
        "w2": packed(experts, dim, inner // 2),
        "w2_scale": scales(experts, dim, inner // 32),
        "topk_weights": torch.rand(tokens, k, generator=generator).to(device),
        "topk_ids": (order - 1).int().to(device),
        "limit": 10.0,
    }


OP = Op(
    name="mxfp4_experts",
    summary="Routed experts on MXFP4 weights with a clamped SwiGLU.",
    axes={
        "T": "tokens", "K": "experts chosen for a token", "E": "experts on this rank",
        "G": "groups of 32 of the hidden size", "J": "groups of 32 of the intermediate size",
    },
    inputs=(
        Arg("x", "T 32*G", (torch.bfloat16,)),
        Arg("w13", "E 64*J 16*G", (torch.uint8,)),
        Arg("w13_scale", "E 64*J G", (torch.uint8,)),
        Arg("w2", "E 32*G 16*J", (torch.uint8,)),
        Arg("w2_scale", "E 32*G J", (torch.uint8,)),
        Arg("topk_weights", "T K", (torch.float32,)),
        Arg("topk_ids", "T K", (torch.int32,)),
    ),
    outputs=(Arg("y", "T 32*G", (torch.bfloat16,)),),
    reference=mxfp4_experts_ref,
    tolerances={"y": Tolerance(5e-3, 6e-2)},
    cases=tuple(
        Case(f"t{t}_e{e}_d{d}_i{i}_k{k}", {"T": t, "E": e, "D": d, "I": i, "K": k}, _inputs)
        for t, e, d, i, k in ((0, 4, 64, 32, 2), (1, 16, 256, 128, 6), (37, 8, 256, 96, 3), (129, 16, 128, 64, 6))
    ),
    bytes_moved=lambda s: min(s["E"], s["T"] * s["K"]) * 3 * s["I"] * s["D"] * 17 // 32 + s["T"] * s["D"] * 4,
    flops=lambda s: s["T"] * s["K"] * 6 * s["I"] * s["D"],
    replaces="vllm.model_executor.layers.fused_moe.experts.marlin_moe.MarlinExperts",
    source="6",
)
