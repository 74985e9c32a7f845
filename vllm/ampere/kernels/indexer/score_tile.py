# SPDX-License-Identifier: Apache-2.0
"""The scores of one query token against a tile of index keys, shared by the Triton kernels of the indexer.

An E4M3 code is 2^-8 of its value as a float16, exactly, so both operands go to the matrix unit without
their scales: the product is 2^-16 of the codes' product, and one exact factor restores it.
"""

from ..quantization.triton_codec import e4m3_to_half
from ..launch import tl, triton


def head_block(heads: int) -> int:
    """Rows of the query tile: a power of two, and 16 at least, which is what the matrix unit takes."""
    return max(16, triton.next_power_of_2(heads))


@triton.jit
def load_queries(q_ptr, row, N: tl.constexpr, HEADS: tl.constexpr):
    """Float16 [128, HEADS] of 2^-8 times the codes of one token; heads from N on are zero."""
    head, d = tl.arange(0, HEADS), tl.arange(0, 128)
    codes = tl.load(q_ptr + (row * N + head)[None, :] * 128 + d[:, None], (head < N)[None, :], other=0)
    return e4m3_to_half(codes)


@triton.jit
def load_weights(weights_ptr, N: tl.constexpr, HEADS: tl.constexpr):
    """Float32 [HEADS]; zero from N on."""
    head = tl.arange(0, HEADS)
    return tl.load(weights_ptr + head, head < N, other=0.0)


@triton.jit
def score_tile(q, weights, codes, key_scale):
    """Float32 [KEYS]: key_scale * sum_h weight_h relu(q_h . k) of codes uint8 [KEYS, 128]; NaN stays NaN."""
    dot = tl.dot(e4m3_to_half(codes), q)
    heads = tl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    return tl.sum(heads, 1) * 65536.0 * key_scale


@triton.jit
def score_paged_keys(q, weights, cache_ptr, stride_cache_page, table_ptr, key, seen, P: tl.constexpr):
    """Float32 [KEYS]: scores of the keys numbered `key` of the request with page table `table_ptr`; -inf if not `seen`."""
    page = tl.load(table_ptr + key // P, seen, other=0).to(tl.int64)
    page_ptr = cache_ptr + page * stride_cache_page
    code_ptr = page_ptr + key % P * 128
    codes = tl.load(code_ptr[:, None] + tl.arange(0, 128)[None, :], seen[:, None], other=0)
    # Byte by byte, since a page may start at any byte.
    scale_ptr = page_ptr + P * 128 + key % P * 4
    byte = tl.arange(0, 4)
    scale = tl.load(scale_ptr[:, None] + byte[None, :], seen[:, None], other=0).to(tl.int32) << (8 * byte)[None, :]
    score = score_tile(q, weights, codes, tl.sum(scale, 1).to(tl.float32, bitcast=True))
    return tl.where(seen, score, float("-inf"))
