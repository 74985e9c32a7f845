# SPDX-License-Identifier: Apache-2.0
"""E4M3 codes to float32 and back.

The format of the latent cache, the index keys and the engram tables: 1 sign, 4 exponent (bias 7) and
3 mantissa bits, no infinity, NaN at 0x7f and 0xff, largest value 448. Ampere has no instruction for
either direction, so both are integer arithmetic here as they will be in registers.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import EXACT, Case, Implementation, Op
from .reference import e4m3_decode_ref, e4m3_encode_ref
from .triton_codec import e4m3_to_float, float_to_e4m3

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _e4m3_decode_kernel(codes_ptr, values_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    codes = tl.load(codes_ptr + offs, mask=offs < count, other=0)
    tl.store(values_ptr + offs, e4m3_to_float(codes), mask=offs < count)


@triton.jit(do_not_specialize=["count"])
def _e4m3_encode_kernel(x_ptr, codes_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < count, other=0.0).to(tl.float32)
    tl.store(codes_ptr + offs, float_to_e4m3(x), mask=offs < count)


def _elementwise(kernel, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One program for each `_BLOCK` elements; a strided input is copied first."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if count := x.numel():
        kernel[(triton.cdiv(count, _BLOCK),)](x.contiguous(), out, count, BLOCK=_BLOCK)
    return out


def _e4m3_decode_triton(codes):
    return _elementwise(_e4m3_decode_kernel, codes, torch.float32)


def _e4m3_encode_triton(x):
    return _elementwise(_e4m3_encode_kernel, x, torch.uint8)


COMPILES = (
    Launch(
        _e4m3_decode_kernel, {"codes_ptr": "*u8:16", "values_ptr": "*fp32:16", "count": "i32"}, {"BLOCK": _BLOCK}
    ),
    Launch(_e4m3_encode_kernel, {"x_ptr": "*fp32:16", "codes_ptr": "*u8:16", "count": "i32"}, {"BLOCK": _BLOCK}),
    Launch(_e4m3_encode_kernel, {"x_ptr": "*bf16:16", "codes_ptr": "*u8:16", "count": "i32"}, {"BLOCK": _BLOCK}),
)


def e4m3_decode(codes: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Decode E4M3 codes.

    Axes: any shape.

    Args:
        codes: uint8 [...], every value allowed.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 of the same shape, newly allocated; NaN for 0x7f and 0xff, -0.0 for 0x80.

    Numerics: exact.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype.
    Source: model_spec section 3.
    """
    DECODE.check(codes=codes)
    return DECODE.choose(codes.device, implementation)(codes)


def e4m3_encode(x: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Encode as E4M3: round to nearest, ties to the even code, saturate.

    Axes: any shape.

    Args:
        x: float32 or bfloat16 [...].
        implementation: one asked for by name; default is the best for the device.

    Returns:
        uint8 of the same shape, newly allocated. Beyond +-448, infinities too: 0x7e or 0xfe. NaN: 0x7f
        or 0xff after its sign. A negative value that rounds to zero: 0x80.

    Numerics: equal, byte for byte, to torch's float8_e4m3fn cast of the value clamped to +-448.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype.
    Source: model_spec section 3 (Q8).
    """
    ENCODE.check(x=x)
    return ENCODE.choose(x.device, implementation)(x)


DECODE = Op(
    name="e4m3_decode",
    summary="Decode E4M3 codes to float32.",
    axes={},
    inputs=(Arg("codes", "...", (torch.uint8,), contiguous="any"),),
    outputs=(Arg("values", "...", (torch.float32,)),),
    reference=e4m3_decode_ref,
    implementations=(Implementation("triton", _e4m3_decode_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"values": EXACT},
    cases=tuple(
        Case(f"n{n}", {"N": n}, lambda s, g, d: {"codes": integers(g, 0, 256, s["N"], dtype=torch.uint8, device=d)})
        for n in (0, 1, 4099)
    ),
    bytes_moved=lambda s: s["N"] * 5,
    flops=lambda s: 0,
    source="3",
)

ENCODE = Op(
    name="e4m3_encode",
    summary="Encode as E4M3, saturating, ties to even.",
    axes={},
    inputs=(Arg("x", "...", (torch.float32, torch.bfloat16), contiguous="any"),),
    outputs=(Arg("codes", "...", (torch.uint8,)),),
    reference=e4m3_encode_ref,
    implementations=(Implementation("triton", _e4m3_encode_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"codes": EXACT},
    cases=tuple(
        Case(
            f"n{n}_{str(dtype).removeprefix('torch.')}",
            {"N": n, "dtype": dtype},
            lambda s, g, d: {"x": normal(g, s["N"], dtype=s["dtype"], device=d, scale=100.0)},
        )
        for n, dtype in ((0, torch.float32), (1, torch.bfloat16), (4099, torch.float32), (4099, torch.bfloat16))
    ),
    bytes_moved=lambda s: s["N"] * (1 + s["dtype"].itemsize),
    flops=lambda s: 0,
    source="3",
)

OPS = (DECODE, ENCODE)
