# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of 64 dimensions in adjacent pairs, in registers.

Kernels that promise the reference's bits are launched with `enable_fp_fusion=False`: a fused multiply-add rounds once
where the reference rounds twice.
"""

from .launch import tl, triton


@triton.jit
def load_pairs(x_ptr, mask, ROWS: tl.constexpr):
    """Pointers [ROWS, 64] -> float32 even and odd elements [ROWS, 32] each; 0 where masked."""
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (ROWS, 32, 2)))


@triton.jit
def load_turn(table_row_ptr):
    """One row of the table, 32 cosines then 32 sines -> float32 [32] each."""
    offs = tl.arange(0, 32)
    return tl.load(table_row_ptr + offs), tl.load(table_row_ptr + 32 + offs)


@triton.jit
def rotate_pairs(even, odd, cos, sin):
    """[ROWS, 32] each -> float32 [ROWS, 64], adjacent pairs turned by the angle of cos and sin."""
    turned = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    return tl.reshape(turned, (even.shape[0], 64))
