# SPDX-License-Identifier: Apache-2.0
"""Mix coefficients from the four streams, and the next sublayer's input.

One projection of all streams gives 24 numbers a token: 4 `pre` (how the NEXT sublayer's input is
collapsed: the mix is delayed by one sublayer), 4 `post` (how strongly this sublayer's output enters
each stream) and a 4x4 matrix `comb`, made nearly doubly stochastic by Sinkhorn's iteration, that mixes
the streams. The input itself is collapsed with the `pre` of the sublayer before.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import normal
from ..contracts import Arg
from ..registry import Case, Op, Tolerance
from .reference import mhc_pre_ref


def mhc_pre(
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    pre_mix: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_alpha: float,
    sinkhorn_iters: int,
    norm_eps: float,
    x: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the mix coefficients of a sublayer and its collapsed, normalised input.

    Axes: T tokens, D hidden size, F columns of the projection.

    Args:
        streams: bfloat16 [T, 4, D], contiguous.
        fn: float32 [24, 4*D], column j*D + d for stream j; or [24, D], summed over the streams, with `x`.
        scale: float32 [3], factors of pre, post and comb.
        base: float32 [24], offsets: 4 pre, 4 post, 16 comb (source stream major).
        pre_mix: float32 [T, 4], the `pre` of the sublayer before; None takes stream 0, the model's entry.
        norm_weight: bfloat16 [D]; None leaves the input without a norm.
        rms_eps: added to the mean square of the projected vector; 1e-20 in the released model.
        pre_eps: added to `pre`; 1e-6.
        sinkhorn_eps: added to the softmax and to each row and column sum; 1e-6.
        post_alpha: factor of `post`; 2.
        sinkhorn_iters: column normalisations, at least 1; 20. Row normalisations: one fewer.
        norm_eps: added to the mean square of the collapsed input; 1e-20.
        x: bfloat16 [T, D]; at the first layer all streams are equal, and the projection reads this one.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        post: float32 [T, 4, 1], in [0, post_alpha].
        comb: float32 [T, 4, 4], row: source stream, column: destination. Column sums are 1 up to rounding
            and sinkhorn_eps, since a column normalisation comes last; row sums converge to 1.
        layer_input: bfloat16 [T, D].
        pre: float32 [T, 4], for the next sublayer.

    Numerics: float32 throughout; the collapsed input is rounded to bfloat16 before its norm, and again after.
    A token has the same bits alone and in any batch.
    Graph safety: allocates its results, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 4; replaces `mhc_pre_delayed_tilelang`.
    """
    axes = OP.check(
        streams=streams, fn=fn, scale=scale, base=base, pre_mix=pre_mix, norm_weight=norm_weight, x=x
    )
    columns = axes["D"] if x is not None else 4 * axes["D"]
    if axes["F"] != columns:
        raise ContractError(f"mhc_pre: fn has {axes['F']} columns, must have {columns}")
    return OP.choose(streams.device, implementation)(
        streams, fn, scale, base, pre_mix, norm_weight,
        rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps, x,
    )


def mix_parameters(generator, columns, device):
    """Random projection, scale and base, of a size that lets every coefficient move."""
    return {
        "fn": normal(generator, 24, columns, dtype=torch.float32, device=device, scale=columns**-0.5),
        "scale": normal(generator, 3, dtype=torch.float32, device=device),
        "base": normal(generator, 24, dtype=torch.float32, device=device),
        "rms_eps": 1e-20,
        "pre_eps": 1e-6,
        "sinkhorn_eps": 1e-6,
        "post_alpha": 2.0,
        "sinkhorn_iters": 20,
        "norm_eps": 1e-20,
    }


def _inputs(sizes, generator, device):
    tokens, dim = sizes["T"], sizes["D"]
    x = normal(generator, tokens, dim, device=device) if sizes["first"] else None
    streams = normal(generator, tokens, 4, dim, device=device)
    pre_mix = normal(generator, tokens, 4, dtype=torch.float32, device=device).sigmoid()
    return {
        "streams": streams if x is None else x.unsqueeze(1).repeat(1, 4, 1),
        **mix_parameters(generator, 4 * dim if x is None else dim, device),
        "pre_mix": None if sizes["first"] else pre_mix,
        "norm_weight": normal(generator, dim, device=device),
        "x": x,
    }


BF16, FP32 = (torch.bfloat16,), (torch.float32,)
MIX_INPUTS = (
    Arg("fn", "24 F", FP32),
    Arg("scale", "3", FP32),
    Arg("base", "24", FP32),
    Arg("pre_mix", "T 4", FP32, optional=True),
    Arg("norm_weight", "D", BF16, optional=True),
)
MIX_OUTPUTS = (
    Arg("post", "T 4 1", FP32),
    Arg("comb", "T 4 4", FP32),
    Arg("layer_input", "T D", BF16),
    Arg("pre", "T 4", FP32),
)
# The worst of 24 mixes of thousands of tokens; the worst element is off by one bfloat16 step of the largest value.
COEFFICIENT, ACTIVATION = Tolerance(1e-5, 1e-3), Tolerance(4e-3, 8e-2)
MIX_TOLERANCES = {"post": COEFFICIENT, "comb": COEFFICIENT, "layer_input": ACTIVATION, "pre": COEFFICIENT}

OP = Op(
    name="mhc_pre",
    summary="Mix coefficients of a sublayer from the four streams, and its collapsed, normalised input.",
    axes={"T": "tokens", "D": "hidden size", "F": "columns of the projection: 4*D, or D with x"},
    inputs=(Arg("streams", "T 4 D", BF16, contiguous="full"), *MIX_INPUTS, Arg("x", "T D", BF16, optional=True)),
    outputs=MIX_OUTPUTS,
    reference=mhc_pre_ref,
    tolerances=MIX_TOLERANCES,
    cases=tuple(
        Case(f"t{t}_d{d}{'_first' if first else ''}", {"T": t, "D": d, "first": first}, _inputs)
        for t, d, first in ((0, 256, False), (1, 5120, False), (63, 256, False), (63, 256, True), (4097, 64, False))
    ),
    bytes_moved=lambda s: s["T"] * s["D"] * 10 + 24 * s["D"] * (4 if s["first"] else 16),
    flops=lambda s: s["T"] * s["D"] * (1 if s["first"] else 4) * (2 * 24 + 2),
    replaces="vllm.model_executor.kernels.mhc.tilelang.mhc_pre_delayed_tilelang",
    source="4",
)
