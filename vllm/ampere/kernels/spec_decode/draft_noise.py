# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise of a draft token, the same bits as upstream's sampler draws.

A draw is a function of the request's seed, the draft step, the position before the token and the token's id in the
whole vocabulary: MurmurHash3 of these four words, as a uniform number, through -log(-log1p(-u)). Which program or
rank draws it makes no difference.
"""

from ..launch import tl, triton

SALT = 1 << 30  # of positions, which keeps drafts apart from the draws of the verifier
_SALT = tl.constexpr(SALT)


@triton.jit
def _mixed(h, word):
    """One block of MurmurHash3 (32 bit)."""
    word *= 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    h ^= word * 0x1B873593
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def _uniform(seed, position, token):
    """float32 in (0, 1): the hash plus one half, times 2^-32, rounded once."""
    h = _mixed(tl.cast(0, tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mixed(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mixed(h, (position & 0xFFFFFFFF).to(tl.uint32))
    h = _mixed(h, token.to(tl.uint32)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h ^= h >> 16
    high, low = (h >> 16).to(tl.int32).to(tl.float32), (h & 0xFFFF).to(tl.int32).to(tl.float32)
    return high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10


@triton.jit
def _log_complement(u):
    """log(1 - u): eight terms of the series below a quarter, where float32 would round 1 - u."""
    series = 1.0 / 7.0 + u * 0.125
    for n in tl.static_range(6, 0, -1):
        series = 1.0 / n + u * series
    return tl.where(u < 0.25, -u * series, tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08)))


@triton.jit
def draft_noise(seed, step, position, token):
    """Standard Gumbel noise of candidate tokens.

    Args:
        seed: int64, of the request.
        step: int32, of the draft block.
        position: int64, of the token that is sampled.
        token: int32 [N], ids in the whole vocabulary.

    Returns:
        float32 [N].
    """
    u = _uniform(seed ^ (step.to(tl.int64) << 32), position - 1 + _SALT, token)
    return -tl.log(-_log_complement(u))
