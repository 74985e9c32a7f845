# SPDX-License-Identifier: Apache-2.0
"""Gate the engram value into the four residual streams.

Each stream compares itself with its own key; a signed square root spreads the small products before
the sigmoid. All streams share one value.
"""

import torch

from ...testing.inputs import normal
from ..contracts import Arg
from ..registry import Case, Op, Tolerance
from .reference import engram_gate_ref


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
