# SPDX-License-Identifier: Apache-2.0
"""The boundary between two sublayers: `mhc_post` of the one before, then `mhc_pre` of the next.

One op, since the streams pass between the two: a kernel reads them once instead of three times.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import unavailable
from ..registry import Case, Implementation, Op
from .mhc_post import AXES, BF16, FP32, POST_INPUTS, ROUNDED_ONCE, post_inputs
from .mhc_pre import ACTIVATION, MIX_INPUTS, MIX_OUTPUTS, MIX_TOLERANCES, mix_parameters
from .mhc_post_pre_triton import mhc_post_pre_triton
from .reference import mhc_post_pre_ref


def mhc_post_pre(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
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
    capture_aux: bool = False,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expand a sublayer's output, then compute the next sublayer's coefficients and input.

    Axes: T tokens, D hidden size.

    Args:
        y, streams, post, comb: as in `mhc_post`.
        fn, scale, base, pre_mix, norm_weight and the six numbers: as in `mhc_pre`, of the next sublayer;
            fn is [24, 4*D].
        capture_aux: also return the mean of the new streams, which a draft model reads.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        streams: bfloat16 [T, 4, D], newly allocated.
        post, comb, layer_input, pre: as in `mhc_pre`.
        aux: bfloat16 [T, D], mean of the four streams; [0, D] unless capture_aux.

    Numerics: as `mhc_post`, whose result is rounded to bfloat16, then `mhc_pre`; the mean is taken in
    float32. Bits are those of the two ops one after the other.
    Graph safety: allocates its results, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 4; replaces `mhc_shifted_post_pre` (its own order: numbers before pre_mix).
    """
    axes = OP.check(
        y=y, streams=streams, post=post, comb=comb,
        fn=fn, scale=scale, base=base, pre_mix=pre_mix, norm_weight=norm_weight,
    )
    if axes["F"] != 4 * axes["D"]:
        raise ContractError(f"mhc_post_pre: fn has {axes['F']} columns, must have {4 * axes['D']}")
    return OP.choose(y.device, implementation)(
        y, streams, post, comb, fn, scale, base, pre_mix, norm_weight,
        rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps, capture_aux,
    )


def _inputs(sizes, generator, device):
    return {
        **post_inputs(sizes, generator, device),
        **mix_parameters(generator, 4 * sizes["D"], device),
        "pre_mix": normal(generator, sizes["T"], 4, dtype=torch.float32, device=device).sigmoid(),
        "norm_weight": normal(generator, sizes["D"], device=device),
        "capture_aux": sizes["aux"],
    }


OP = Op(
    name="mhc_post_pre",
    summary="Expand a sublayer's output, then mix coefficients and input of the next sublayer.",
    axes=AXES | {"F": "columns of the projection, 4*D", "A": "T if the mean is captured, else 0"},
    inputs=POST_INPUTS + MIX_INPUTS,
    outputs=(Arg("streams", "T 4 D", BF16), *MIX_OUTPUTS, Arg("aux", "A D", BF16)),
    reference=mhc_post_pre_ref,
    implementations=(Implementation("triton", mhc_post_pre_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"streams": ROUNDED_ONCE, **MIX_TOLERANCES, "aux": ACTIVATION},
    cases=tuple(
        Case(f"t{t}_d{d}{'_aux' if aux else ''}", {"T": t, "D": d, "aux": aux}, _inputs)
        for t, d, aux in ((0, 256, True), (1, 5120, False), (5, 160, True), (63, 256, True), (4097, 96, False))
    ),
    bytes_moved=lambda s: s["T"] * s["D"] * (20 + 2 * s["aux"]) + 24 * s["D"] * 16,
    flops=lambda s: s["T"] * s["D"] * (4 * 50 + 40 + 8),
    replaces="vllm.models.deepseek_v41.nvidia.ops.mhc.mhc_shifted_post_pre",
    source="4",
)
