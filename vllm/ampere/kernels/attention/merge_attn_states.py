# SPDX-License-Identifier: Apache-2.0
"""Merge the partial results of attention split over its keys, and count the sink once.

Each split brings its output divided by its own denominator, and the logarithm of that denominator:

    o_h = sum_s e^(lse_sh - m) o_sh / (sum_s e^(lse_sh - m) + e^(sink_h - m))
"""

import torch

from ...testing.inputs import normal
from ..contracts import Arg
from ..registry import Case, Op, Tolerance
from .reference import merge_attn_states_ref


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
    tolerances={"o": Tolerance(2e-3, 4e-2)},
    cases=tuple(
        Case(f"s{s}_t{t}_h{h}", {"S": s, "T": t, "H": h}, _inputs)
        for s, t, h in ((1, 1, 8), (4, 0, 8), (5, 7, 16), (16, 2, 64))
    ),
    bytes_moved=lambda s: s["T"] * s["H"] * (s["S"] * (512 * 4 + 4) + 512 * 2),
    flops=lambda s: s["T"] * s["H"] * s["S"] * 512 * 2,
    source="5",
)
