# SPDX-License-Identifier: Apache-2.0
"""UE8M0 scales: one byte e stands for 2^(e-127), the exponent field of a float32."""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..registry import EXACT, Case, Op
from .reference import power_of_two_scale_ref, ue8m0_decode_ref


def ue8m0_decode(codes: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Decode UE8M0 bytes by moving them into a float32's exponent field.

    Axes: any shape.

    Args:
        codes: uint8 [...], every value allowed.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 of the same shape, newly allocated: 2^(byte-127) for 1 to 254, +0.0 for 0 (where the
        format means 2^-127, which is not a normal float32) and +inf for 255 (where it means NaN).

    Numerics: exact.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype.
    Source: model_spec sections 3 and 12.
    """
    DECODE.check(codes=codes)
    return DECODE.choose(codes.device, implementation)(codes)


def power_of_two_scale(amax: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """The UE8M0 byte of the smallest power of two that keeps a group inside E4M3.

    Axes: any shape.

    Args:
        amax: float32 [...], largest magnitude of each group; values below 1e-4 count as 1e-4.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        uint8 of the same shape, newly allocated: ceil(log2(amax / 448)) + 127; 255 for infinity and NaN.

    Numerics: amax is multiplied by float32(1/448), rounded once; the ceiling is read off the bits
        (exponent field, plus one if the mantissa is not zero), so exact powers of two stay put.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype.
    Source: model_spec section 3 (p2, Q8); upstream_gates section 2.5.
    """
    SCALE.check(amax=amax)
    return SCALE.choose(amax.device, implementation)(amax)


DECODE = Op(
    name="ue8m0_decode",
    summary="Decode power-of-two scale bytes to float32.",
    axes={},
    inputs=(Arg("codes", "...", (torch.uint8,), contiguous="any"),),
    outputs=(Arg("scales", "...", (torch.float32,)),),
    reference=ue8m0_decode_ref,
    tolerances={"scales": EXACT},
    cases=tuple(
        Case(f"n{n}", {"N": n}, lambda s, g, d: {"codes": integers(g, 0, 256, s["N"], dtype=torch.uint8, device=d)})
        for n in (0, 1, 4099)
    ),
    bytes_moved=lambda s: s["N"] * 5,
    flops=lambda s: 0,
    source="3",
)

SCALE = Op(
    name="power_of_two_scale",
    summary="Choose the power-of-two scale byte of a group from its largest magnitude.",
    axes={},
    inputs=(Arg("amax", "...", (torch.float32,), contiguous="any"),),
    outputs=(Arg("codes", "...", (torch.uint8,)),),
    reference=power_of_two_scale_ref,
    tolerances={"codes": EXACT},
    cases=tuple(
        Case(f"n{n}", {"N": n}, lambda s, g, d: {"amax": normal(g, s["N"], dtype=torch.float32, device=d).abs()})
        for n in (0, 1, 4099)
    ),
    bytes_moved=lambda s: s["N"] * 5,
    flops=lambda s: 0,
    source="3",
)

OPS = (DECODE, SCALE)
