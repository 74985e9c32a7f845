# SPDX-License-Identifier: Apache-2.0
"""E4M3 and UE8M0 in registers: device functions for Triton kernels, in integer arithmetic.

Ampere has no fp8 conversion, and Triton refuses its fp8e4nv type there. E4M3 is float16 with a shorter mantissa and
another bias, so a code moved into a float16's fields reads as value / 256, subnormals included. Encoding rounds a
float32's bits. Everything agrees with `reference.py` bit for bit.
"""

import struct

from ...cache_layout import AMAX_FLOOR, E4M3_MAX
from ..launch import tl, triton

_FLOOR_BITS = tl.constexpr(int.from_bytes(struct.pack("<f", AMAX_FLOOR), "little"))
_PER_MAX = tl.constexpr(1.0 / E4M3_MAX)


@triton.jit
def e4m3_to_half(code):
    """uint8 E4M3 codes -> float16 of value / 256, exact; NaN for 0x7f and 0xff."""
    wide = code.to(tl.uint16)
    magnitude = wide & 0x7F
    # 0x7f + 1 carries into bit 7, which completes the exponent field of a float16 NaN.
    bits = ((wide & 0x80) << 8) | (magnitude << 7) | (((magnitude + 1) & 0x80) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _halves_of_bytes_0_and_2(word):
    """int32 words of four E4M3 codes -> int32 words of two float16, as `e4m3_to_half` makes them."""
    magnitude = word & 0x7F007F
    return ((magnitude | ((magnitude + 0x10001) & 0x800080)) << 7) | ((word << 8) & -0x7FFF8000)


@triton.jit
def e4m3_words_to_half(words, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """int32 [ROWS, WIDTH / 4], four E4M3 codes a word -> float16 [ROWS, WIDTH] as of `e4m3_to_half`.

    Two codes an operation, in halves of a register: a third of the instructions that bytes take.
    """
    even, odd = _halves_of_bytes_0_and_2(words), _halves_of_bytes_0_and_2(words >> 8)
    firsts = tl.join(even.to(tl.int16), (even >> 16).to(tl.int16))
    seconds = tl.join(odd.to(tl.int16), (odd >> 16).to(tl.int16))
    return tl.reshape(tl.join(firsts, seconds), (ROWS, WIDTH)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_words_to_half_shuffled(words, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """As `e4m3_words_to_half`, but the codes of each word in the order 0, 2, 1, 3, in which they lie in registers.

    For both operands of a dot, which may add its products in any order that is the same for both.
    """
    even, odd = _halves_of_bytes_0_and_2(words), _halves_of_bytes_0_and_2(words >> 8)
    lower = tl.join(even.to(tl.int16), odd.to(tl.int16))
    upper = tl.join((even >> 16).to(tl.int16), (odd >> 16).to(tl.int16))
    return tl.reshape(tl.join(lower, upper), (ROWS, WIDTH)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3_to_float(code):
    """uint8 E4M3 codes -> float32, exact; NaN for 0x7f and 0xff."""
    return e4m3_to_half(code).to(tl.float32) * 256.0


@triton.jit
def float_to_e4m3(x):
    """float32 -> uint8 E4M3 codes: nearest, ties to the even code, saturating; NaN gives 0x7f or 0xff."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # One unit in the last place of 2^14 is one step of the codes below 2^-6.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, tl.minimum(normal, 0x7E))
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (((bits >> 24) & 0x80) | code).to(tl.uint8)


@triton.jit
def ue8m0_to_float(byte):
    """UE8M0 bytes (any integer type, 0 to 255) -> float32 2^(byte-127); 0.0 for 0, infinity for 255."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """float32 -> int32 bits of |x|, which order as the magnitudes do, infinity and then NaN last.

    The largest of a group is an integer maximum, which unlike a float one keeps a NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def power_of_two_byte(amax_bits):
    """int32 bits of a group's largest magnitude -> int32 ceil(log2(max(amax, 1e-4) / 448)) + 127.

    255 for infinity and NaN, in whose groups no code decodes to a number.
    """
    amax = tl.maximum(amax_bits, _FLOOR_BITS).to(tl.float32, bitcast=True)
    bits = (amax * _PER_MAX).to(tl.int32, bitcast=True)
    return tl.minimum(((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)


@triton.jit
def inverse_scale(byte):
    """int32 UE8M0 bytes -> float32 2^(127-byte), the factor before encoding; 0.0 for 254 and 255."""
    return ue8m0_to_float(tl.maximum(254 - byte, 0))
