# SPDX-License-Identifier: Apache-2.0
"""The codecs in integer arithmetic (model_spec section 3): what a card without fp8 instructions does in registers.

A minifloat of `m` mantissa bits and exponent bias `b` is a float32 with a shorter mantissa and another
bias, so both directions are a shift and an add; below 2^(1-b) the codes are evenly spaced instead.
"""

import functools

import torch

from ...cache_layout import AMAX_FLOOR, E4M3_MAX

_FLOAT32_BIAS, _FLOAT32_MANTISSA = 127, 23


def _decode_magnitude(code: torch.Tensor, mantissa_bits: int, bias: int) -> torch.Tensor:
    """int32 codes without sign -> float32."""
    rebias = (_FLOAT32_BIAS - bias) << mantissa_bits
    normal = ((code + rebias) << (_FLOAT32_MANTISSA - mantissa_bits)).view(torch.float32)
    step = 2.0 ** (1 - bias - mantissa_bits)
    return torch.where(code < 1 << mantissa_bits, code * step, normal)


def _encode_magnitude(magnitude: torch.Tensor, mantissa_bits: int, bias: int) -> torch.Tensor:
    """Non-negative float32 -> int32 codes, nearest, ties to the even code; not saturated."""
    bits = magnitude.view(torch.int32)
    shift = _FLOAT32_MANTISSA - mantissa_bits
    rounded = (bits + (1 << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift
    normal = rounded - ((_FLOAT32_BIAS - bias) << mantissa_bits)
    # One unit in the last place of this number is one step of the evenly spaced codes.
    magic = torch.tensor(2.0 ** (_FLOAT32_MANTISSA + 1 - bias - mantissa_bits), device=magnitude.device)
    even = (magnitude + magic).view(torch.int32) - magic.view(torch.int32)
    return torch.where(magnitude < 2.0 ** (1 - bias), even, normal)


def _ceil_power_byte(x: torch.Tensor) -> torch.Tensor:
    """Positive float32 -> uint8 of ceil(log2 x) + 127; infinity and NaN give 255."""
    bits = x.view(torch.int32)
    return ((bits >> 23 & 0xFF) + (bits & 0x7FFFFF != 0)).clamp_max(255).to(torch.uint8)


def e4m3_decode_ref(codes: torch.Tensor) -> torch.Tensor:
    """See `e4m3_decode`."""
    code = codes.to(torch.int32)
    magnitude = _decode_magnitude(code & 0x7F, 3, 7)
    magnitude = torch.where(code & 0x7F == 0x7F, torch.nan, magnitude)
    return torch.where(code & 0x80 != 0, -magnitude, magnitude)


def e4m3_encode_ref(x: torch.Tensor) -> torch.Tensor:
    """See `e4m3_encode`."""
    x = x.float()
    magnitude = x.abs()
    code = _encode_magnitude(magnitude.contiguous(), 3, 7)
    code = torch.where(magnitude > E4M3_MAX, 0x7E, code)
    code = torch.where(x.isnan(), 0x7F, code)
    return (code | torch.where(x.signbit(), 0x80, 0)).to(torch.uint8)


def ue8m0_decode_ref(codes: torch.Tensor) -> torch.Tensor:
    """See `ue8m0_decode`."""
    return (codes.to(torch.int32) << 23).view(torch.float32)


def power_of_two_scale_ref(amax: torch.Tensor) -> torch.Tensor:
    """See `power_of_two_scale`."""
    return _ceil_power_byte(amax.clamp_min(AMAX_FLOOR) * (1.0 / E4M3_MAX))


def quantize_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 with one power-of-two scale for each `group` consecutive values of the last dimension.

    Args:
        x: float32 or bfloat16 [..., G*group].

    Returns:
        codes uint8 [..., G*group] and scale bytes uint8 [..., G]. A group that holds an infinity or a
        NaN takes byte 255, under which no code decodes to a number.
    """
    grouped = x.float().unflatten(-1, (-1, group))
    scale = power_of_two_scale_ref(grouped.abs().amax(-1))
    inverse = ue8m0_decode_ref((254 - scale.to(torch.int32)).clamp_min(0))
    return e4m3_encode_ref(grouped * inverse.unsqueeze(-1)).flatten(-2), scale


@functools.cache
def _mxfp4_pairs(device: torch.device) -> torch.Tensor:
    """float32 [256, 2]: the two values of each byte, low code first."""
    code = torch.arange(16, dtype=torch.int32, device=device)
    value = torch.where(code & 8 != 0, -1.0, 1.0) * _decode_magnitude(code & 7, 1, 1)
    return torch.stack([value.repeat(16), value.repeat_interleave(16)], -1)


def mxfp4_decode_ref(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """See `mxfp4_decode`."""
    values = torch.nn.functional.embedding(packed.view(torch.uint8).to(torch.int32), _mxfp4_pairs(packed.device))
    values = values.flatten(-2)
    return (values.unflatten(-1, (-1, 32)) * ue8m0_decode_ref(scales).unsqueeze(-1)).flatten(-2)


def mxfp4_encode_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `mxfp4_encode`."""
    grouped = x.float().unflatten(-1, (-1, 32))
    scale = _ceil_power_byte(grouped.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
    scaled = (grouped * ue8m0_decode_ref(254 - scale.to(torch.int32)).unsqueeze(-1)).flatten(-2)
    code = _encode_magnitude(scaled.abs(), 1, 1) | torch.where(scaled.signbit(), 8, 0)
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8), scale
