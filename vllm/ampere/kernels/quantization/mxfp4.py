# SPDX-License-Identifier: Apache-2.0
"""MXFP4 matrices: two E2M1 codes a byte, one UE8M0 scale for 32 consecutive columns.

The format of the routed experts' weights. E2M1 magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4, 6 for codes 0
to 7; bit 3 is the sign; the even column sits in the low nibble.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..registry import EXACT, Case, Op
from .reference import mxfp4_decode_ref, mxfp4_encode_ref


def mxfp4_decode(packed: torch.Tensor, scales: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Decode an MXFP4 matrix.

    Axes: N rows, G groups of 32 columns.

    Args:
        packed: uint8 or int8 [N, 16*G]; the low nibble is the even column.
        scales: uint8 [N, G], UE8M0.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 [N, 32*G], newly allocated. Scale byte 0 decodes as 0, byte 255 as infinity (so that a
        zero under it is NaN); the released checkpoint holds neither.

    Numerics: exact, save below 2^-126.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec sections 3 and 6.
    """
    DECODE.check(packed=packed, scales=scales)
    return DECODE.choose(packed.device, implementation)(packed, scales)


def mxfp4_encode(x: torch.Tensor, *, implementation: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to MXFP4.

    Axes: N rows, G groups of 32 columns.

    Args:
        x: float32 or bfloat16 [N, 32*G], finite.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        packed uint8 [N, 16*G] and scales uint8 [N, G], newly allocated. The scale of a group is
        2^ceil(log2(amax / 6)) with amax at least 6 * 2^-126: bytes 1 to 253, and a zero group has byte 1.

    Numerics: round to nearest, ties to the even code.
    Graph safety: allocates its results, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape or stride.
    Source: model_spec section 3 (Q4m).
    """
    ENCODE.check(x=x)
    return ENCODE.choose(x.device, implementation)(x)


_AXES = {"N": "rows", "G": "groups of 32 columns"}
_PACKED, _SCALES = Arg("packed", "N 16*G", (torch.uint8,)), Arg("scales", "N G", (torch.uint8,))
_SIZES = ((0, 1), (1, 1), (33, 5))


def _coded(sizes, generator, device):
    rows, groups = sizes["N"], sizes["G"]
    return {
        "packed": integers(generator, 0, 256, rows, groups * 16, dtype=torch.uint8, device=device),
        "scales": integers(generator, 110, 140, rows, groups, dtype=torch.uint8, device=device),
    }


DECODE = Op(
    name="mxfp4_decode",
    summary="Decode an MXFP4 matrix to float32.",
    axes=_AXES,
    inputs=(Arg("packed", "N 16*G", (torch.uint8, torch.int8)), _SCALES),
    outputs=(Arg("x", "N 32*G", (torch.float32,)),),
    reference=mxfp4_decode_ref,
    tolerances={"x": EXACT},
    cases=tuple(Case(f"n{n}_g{g}", {"N": n, "G": g}, _coded) for n, g in _SIZES),
    bytes_moved=lambda s: s["N"] * s["G"] * (16 + 1 + 128),
    flops=lambda s: s["N"] * s["G"] * 32,
    source="6",
)

ENCODE = Op(
    name="mxfp4_encode",
    summary="Quantise a matrix to MXFP4, ties to the even code.",
    axes=_AXES,
    inputs=(Arg("x", "N 32*G", (torch.float32, torch.bfloat16)),),
    outputs=(_PACKED, _SCALES),
    reference=mxfp4_encode_ref,
    tolerances={"packed": EXACT, "scales": EXACT},
    cases=tuple(
        Case(
            f"n{n}_g{g}",
            {"N": n, "G": g},
            lambda s, g, d: {"x": normal(g, s["N"], 32 * s["G"], dtype=torch.float32, device=d)},
        )
        for n, g in _SIZES
    ),
    bytes_moved=lambda s: s["N"] * s["G"] * (16 + 1 + 128),
    flops=lambda s: s["N"] * s["G"] * 32,
    source="3",
)

OPS = (DECODE, ENCODE)
