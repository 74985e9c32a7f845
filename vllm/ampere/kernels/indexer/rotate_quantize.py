# SPDX-License-Identifier: Apache-2.0
"""Rotation and quantisation of rows of 128, shared by the Triton kernels that write index queries and keys."""

from ..launch import tl, triton
from ..quantization.triton_codec import float_to_e4m3, inverse_scale, magnitude_bits, power_of_two_byte


@triton.jit
def rotate_quantize(x, position, live, cos_sin_ptr, stride_position, ROWS: tl.constexpr):
    """Rotate the last 64 of 128 dimensions, round to bfloat16, quantise with one scale a row.

    Args:
        x: float32 [ROWS, 128] of bfloat16 values.
        position: int64 [ROWS], rows of the table; read where `live`.

    Returns:
        codes uint8 [ROWS, 128] and scale bytes int32 [ROWS].
    """
    even, odd = tl.split(tl.reshape(x, (ROWS, 64, 2)))
    pair = tl.arange(0, 64)[None, :]
    rotated = live[:, None] & (pair >= 32)
    table_ptr = cos_sin_ptr + position[:, None] * stride_position + pair
    cos = tl.load(table_ptr - 32, rotated, other=1.0)
    sin = tl.load(table_ptr, rotated, other=0.0)
    turned_even = (even * cos - odd * sin).to(tl.bfloat16).to(tl.float32)
    turned_odd = (odd * cos + even * sin).to(tl.bfloat16).to(tl.float32)
    # Selected, not multiplied by 1 and 0: an infinity would turn its neighbour into NaN.
    even, odd = tl.where(rotated, turned_even, even), tl.where(rotated, turned_odd, odd)
    byte = power_of_two_byte(tl.max(tl.maximum(magnitude_bits(even), magnitude_bits(odd)), 1))
    factor = inverse_scale(byte)[:, None]
    codes = tl.join(float_to_e4m3(even * factor), float_to_e4m3(odd * factor))
    return tl.reshape(codes, (ROWS, 128)), byte
