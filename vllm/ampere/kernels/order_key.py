# SPDX-License-Identifier: Apache-2.0
"""Floats as integers of the same order, shared by the Triton kernels that choose the largest.

Integers have no NaN and one zero, so every comparison, maximum and count is exact and total.
"""

from .launch import tl, triton

BELOW_ALL = -(2**31)
_LOWEST = tl.constexpr(BELOW_ALL)
_HIGHEST = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(x):
    """float32 -> int32, above `BELOW_ALL`, of the same order; both zeros are 0, and every NaN is above infinity."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, tl.where(bits == _LOWEST, 0, bits ^ 0x7FFFFFFF), bits)
    return tl.where(x != x, _HIGHEST, key)
