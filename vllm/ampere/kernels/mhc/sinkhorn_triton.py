# SPDX-License-Identifier: Apache-2.0
"""The mixing matrix of hyper-connections in registers: a softmax of each row, then Sinkhorn's iteration.

A matrix is 16 numbers of a thread, row-major, since a sum over lanes takes longer; or as many vectors, a token in each place.
"""

from ..launch import tl, triton


@triton.jit
def softmax_of_four(m0, m1, m2, m3, eps):
    """`eps` more than the softmax of four float32."""
    highest = tl.maximum(tl.maximum(m0, m1), tl.maximum(m2, m3))
    e0, e1, e2, e3 = tl.exp(m0 - highest), tl.exp(m1 - highest), tl.exp(m2 - highest), tl.exp(m3 - highest)
    whole = (e0 + e1) + (e2 + e3)
    return e0 / whole + eps, e1 / whole + eps, e2 / whole + eps, e3 / whole + eps


@triton.jit
def _normalised(comb, eps, LINE: tl.constexpr, STEP: tl.constexpr):
    """A matrix whose lines are divided by their sums: rows lie 4 apart with steps of 1, columns 1 with 4.

    The square of a root's reciprocal takes fewer instructions than a division: forty of either wait for each other.
    """
    factors, scaled = (), ()
    for line in tl.static_range(4):
        first = comb[LINE * line] + comb[LINE * line + STEP]
        root = tl.rsqrt(first + (comb[LINE * line + 2 * STEP] + comb[LINE * line + 3 * STEP]) + eps)
        factors = factors + (root * root,)
    for i in tl.static_range(16):
        scaled = scaled + (comb[i] * factors[i // LINE % 4],)
    return scaled


@triton.jit
def balanced(comb, turns, eps):
    """A matrix after `turns` of Sinkhorn's iteration, columns first; rows begin with the second turn."""
    for turn in range(turns):
        if turn > 0:
            comb = _normalised(comb, eps, 4, 1)
        comb = _normalised(comb, eps, 1, 4)
    return comb
