# SPDX-License-Identifier: Apache-2.0
"""The routed experts of up to 16 tokens, on the weights as Marlin repacked them.

Marlin serves every batch; for a decode step it launches six kernels and multiplies padding. This reads the same
memory, so that both can serve one copy of the weights, in two launches: gate, up, clamp, SiLU and the router's weight,
then the down projection summed over experts. Every weight of a chosen expert is read once, whatever the tokens.
"""

import torch

from ...errors import ContractError
from ...expert_layout import down_inputs
from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import unavailable
from ..registry import EXACT, Case, Implementation, Op, Tolerance
from .mxfp4_experts_triton import MAX_TOKENS, mxfp4_experts_decode_triton
from .reference import mxfp4_experts_decode_ref

ARRIVAL_COUNTERS = 1024


def faster_up_to(width: int, spread: bool) -> int:
    """Up to how many tokens this op takes less time than Marlin on the same memory: 1, or 0 where Marlin is faster.

    Args:
        width: intermediate size of the experts on this rank.
        spread: whether whole experts are spread over ranks, so that few of a token's are here.

    Source: benchmarks/results/2026-11-30-kernels-4-h200.json, mxfp4_experts/*/vs-marlin-least-padding, Marlin's time over
        this one's for one token: 1.249 at 288 wide (TP8), 1.110 at 576 (TP4), 0.953 at 1,152 (TP2), 1.884 at 2,304 spread
        over eight ranks (EP8). For six tokens it is 0.982 at most, for 16 0.683.
    """
    return int(spread or width <= 576)


def mxfp4_experts_decode(
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    arrived: torch.Tensor,
    limit: float,
    expert_map: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Sum over the chosen experts of weight * W2 (silu(min(W1 x, limit)) * clamp(W3 x, -limit, limit)).

    Axes: T tokens, at most 16; K experts chosen for a token; E experts on this rank; X experts of all ranks; G = D/64
    blocks of the hidden size D; J = I/32 groups of this rank's intermediate size I; H groups of w2, at least J; C
    counters, at least 1024.

    Args:
        x: bfloat16 [T, D]; its magnitudes and those of weight * hidden activation must be below 2^63.
        w13: int32 [E, D/16, 4*I], MXFP4 in Marlin's layout, outputs in pairs: gate 0, up 0, gate 1, up 1, ...
        w13_scale: uint8 [E, D/32, 2*I], UE8M0 in Marlin's order.
        w2: int32 [E, 2*H, 2*D], MXFP4 in Marlin's layout; groups J and beyond are padding and not read.
        w2_scale: uint8 [E, H, D], UE8M0 in Marlin's order.
        topk_weights: float32 [T, K].
        topk_ids: int32 or int64 [T, K]; a negative id adds nothing (padding), nor does, without `expert_map`, one from E
            on (another rank's).
        out: bfloat16 [T, D], written in place; zero for a token without an expert here.
        arrived: int32 [C], zeros, and zeros again afterwards; calls that share it must not run at the same time.
        limit: clamp of the gate from above and of the up projection from both sides; 10 in the released model.
        expert_map: int32 [X]: number on this rank of each expert, negative for another rank's; ids are below X.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        None.

    Numerics: exact decoding save scale byte 0, which decodes as 0; float32 sums; weight * hidden activation is rounded
        to bfloat16 before W2. The same inputs give the same bits; another batch may add its terms in another order.
    Graph safety: allocates workspace, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, more than 16 tokens, too few counters, H below J.
    Source: model_spec section 6; replaces `MarlinExperts` for small batches.
    """
    axes = OP.check(
        x=x, w13=w13, w13_scale=w13_scale, w2=w2, w2_scale=w2_scale, topk_weights=topk_weights, topk_ids=topk_ids,
        out=out, arrived=arrived, expert_map=expert_map,
    )  # fmt: skip
    for axis, low, high in (("T", 0, MAX_TOKENS), ("H", axes["J"], None), ("C", ARRIVAL_COUNTERS, None)):
        if axes[axis] < low or (high is not None and axes[axis] > high):
            bound = f"at least {low}" if high is None else f"at most {high}"
            raise ContractError(f"{OP.name}: {axis} is {axes[axis]}, must be {bound}")
    OP.choose(x.device, implementation)(
        x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, out, arrived, limit, expert_map
    )


def _inputs(sizes, generator, device):
    tokens, experts, dim, inner, k, ranks = (sizes[axis] for axis in "TEDIKR")

    def words(*shape):
        return integers(generator, -(2**31), 2**31, *shape).to(device=device, dtype=torch.int32)

    def scales(*shape):
        return integers(generator, 118, 124, *shape, dtype=torch.uint8, device=device)

    held, everywhere = down_inputs(inner), experts * ranks
    w2_scale = scales(experts, held // 32, dim)
    w2_scale[:, inner // 32 :] = 255
    # Without a map, ids one off either end are other ranks'.
    order = torch.rand(tokens, everywhere + 2 * (ranks == 1), generator=generator).argsort(-1)[:, :k]
    number = torch.where(torch.arange(everywhere) % ranks == 0, torch.arange(everywhere) // ranks, -1)
    return {
        "x": normal(generator, tokens, dim, device=device),
        "w13": words(experts, dim // 16, 4 * inner),
        "w13_scale": scales(experts, dim // 32, 2 * inner),
        "w2": words(experts, held // 16, 2 * dim),
        "w2_scale": w2_scale,
        "topk_weights": torch.rand(tokens, k, generator=generator, dtype=torch.float32).to(device),
        "topk_ids": (order - int(ranks == 1)).int().contiguous().to(device),
        "out": torch.full((tokens, dim), torch.nan, dtype=torch.bfloat16, device=device),
        "arrived": torch.zeros(ARRIVAL_COUNTERS, dtype=torch.int32, device=device),
        "limit": 10.0,
        "expert_map": number.int().to(device) if ranks > 1 else None,
    }


def _bytes_moved(sizes):
    """Weights of the experts that are chosen on average, each once, and the rows of x and out."""
    everywhere = sizes["E"] * sizes["R"]
    chosen = sizes["E"] * (1 - (1 - sizes["K"] / everywhere) ** sizes["T"])
    return round(chosen * 3 * sizes["I"] * sizes["D"] * 17 / 32) + sizes["T"] * sizes["D"] * 4


OP = Op(
    name="mxfp4_experts_decode",
    summary="Routed experts of up to 16 tokens, on weights in Marlin's layout.",
    axes={
        "T": "tokens", "K": "experts chosen for a token", "E": "experts on this rank", "X": "experts of all ranks",
        "G": "blocks of 64 of the hidden size", "J": "groups of 32 of the intermediate size",
        "H": "groups of w2 in memory", "C": "counters",
    },
    inputs=(
        Arg("x", "T 64*G", (torch.bfloat16,)),
        Arg("w13_scale", "E 2*G 64*J", (torch.uint8,), contiguous="full"),
        Arg("w13", "E 4*G 128*J", (torch.int32,), contiguous="full"),
        Arg("w2_scale", "E H 64*G", (torch.uint8,), contiguous="full"),
        Arg("w2", "E 2*H 128*G", (torch.int32,), contiguous="full"),
        Arg("topk_weights", "T K", (torch.float32,), contiguous="full"),
        Arg("topk_ids", "T K", (torch.int32, torch.int64), contiguous="full"),
        Arg("out", "T 64*G", (torch.bfloat16,)),
        Arg("arrived", "C", (torch.int32,), contiguous="full"),
        Arg("expert_map", "X", (torch.int32,), optional=True),
    ),
    outputs=(),
    reference=mxfp4_experts_decode_ref,
    implementations=(Implementation("triton", mxfp4_experts_decode_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"out": Tolerance(6e-3, 1e-1), "arrived": EXACT},
    mutates=("out", "arrived"),
    cases=tuple(
        Case(f"t{t}_e{e}_d{d}_i{i}_k{k}_r{r}", {"T": t, "E": e, "D": d, "I": i, "K": k, "R": r}, _inputs)
        for t, e, d, i, k, r in (
            (0, 4, 128, 32, 2, 1), (1, 8, 512, 96, 6, 1), (6, 8, 256, 64, 3, 1), (16, 4, 128, 96, 3, 1),
            (9, 4, 256, 32, 6, 3), (1, 4, 5120, 288, 2, 1),
        )
    ),
    bytes_moved=_bytes_moved,
    flops=lambda s: s["T"] * s["K"] * 6 * s["I"] * s["D"] // s["R"],
    replaces="vllm.model_executor.layers.fused_moe.experts.marlin_moe.MarlinExperts",
    source="6",
)  # fmt: skip
