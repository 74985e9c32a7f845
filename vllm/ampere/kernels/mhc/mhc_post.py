# SPDX-License-Identifier: Apache-2.0
"""Expand a sublayer's output into the four streams, and collapse the streams into one.

The two ends of a sublayer as ops of their own: upstream calls them apart from the fused boundary at an
engram layer, at a pipeline cut and before the final norm.
"""

import torch

from ...testing.inputs import normal
from ..contracts import Arg
from ..registry import Case, Op, Tolerance
from .reference import mhc_collapse_ref, mhc_post_ref


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
    tolerances={"collapsed": ROUNDED_ONCE},
    cases=tuple(Case(f"t{t}_d{d}", {"T": t, "D": d}, _collapse_inputs) for t, d in _SIZES),
    bytes_moved=lambda s: s["T"] * (s["D"] * 10 + 16),
    flops=lambda s: s["T"] * s["D"] * 8,
    replaces="vllm.model_executor.kernels.mhc.triton.hc_collapse_triton",
    source="4",
)

OPS = (MHC_POST, MHC_COLLAPSE)
