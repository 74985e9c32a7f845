# SPDX-License-Identifier: Apache-2.0
"""The scores of a block of query tokens against a tile of index keys, shared by the Triton kernels of the indexer.

An E4M3 code is 2^-8 of its value as a float16, exactly, so both operands go to the matrix unit without
their scales: the product is 2^-16 of the codes' product, and one exact factor restores it.

The columns of a block of TOKENS tokens are its heads, eight at a time: heads 0 to 7 of each token, then 8 to 15 of each.
The matrix unit hands out columns by eights, so the warps that share a tile hold whole tokens, and the heads of a token
are added in one order for any number of tokens beside it.
"""

import torch

from ..launch import tl, triton
from ..quantization.triton_codec import e4m3_words_to_half

_EIGHT = tl.constexpr(8)


def head_block(heads: int) -> int:
    """Columns of a token: a power of two, and 16 at least, which is what the matrix unit takes."""
    return max(16, triton.next_power_of_2(heads))


@triton.jit
def _load_words(row_ptr, seen, ALIGNED: tl.constexpr):
    """Int32 [ROWS, 32]: the 128 codes at each of uint8 pointers [ROWS], four a word; 0 if not `seen`."""
    word = tl.arange(0, 32)
    if ALIGNED:
        return tl.load(row_ptr.to(tl.pointer_type(tl.int32))[:, None] + word[None, :], seen[:, None], other=0)
    byte = tl.arange(0, 4)[None, None, :]
    codes = tl.load(row_ptr[:, None, None] + 4 * word[None, :, None] + byte, seen[:, None, None], other=0)
    return tl.sum(codes.to(tl.int32) << (8 * byte), 2)


@triton.jit
def _columns(TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """The token and the head of each column."""
    column = tl.arange(0, TOKENS * HEADS)
    return column // _EIGHT % TOKENS, column // (TOKENS * _EIGHT) * _EIGHT + column % _EIGHT


@triton.jit
def _decode(words, ROWS: tl.constexpr):
    """Float16 [ROWS, 128] of 2^-8 times the codes of int32 words [ROWS, 32].

    The result of a branch, whose sides are one and whose condition always holds: Triton looks back from a dot for the
    narrowest load, lays the operand out for that (bank conflicts), and moves what it passes into that layout, where each
    warp decodes the whole tile again. It does not look back through a branch.
    """
    if tl.num_programs(0) > 0:
        numbers = e4m3_words_to_half(words, ROWS, 128)
    else:
        numbers = e4m3_words_to_half(words, ROWS, 128)
    return numbers


@triton.jit
def load_queries(q_ptr, row, tokens, N: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ALIGNED: tl.constexpr):
    """Float16 [128, TOKENS * HEADS] of 2^-8 times the codes of tokens `row` and on; zero from `tokens` and N on."""
    token, head = _columns(TOKENS, HEADS)
    seen = (row + token < tokens) & (head < N)
    words = _load_words(q_ptr + ((row + token) * N + head) * 128, seen, ALIGNED)
    return tl.trans(_decode(words, TOKENS * HEADS))


@triton.jit
def load_weights(weights_ptr, stride_row, row, tokens, N: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Float32 [TOKENS * HEADS]; zero from `tokens` and N on."""
    token, head = _columns(TOKENS, HEADS)
    return tl.load(weights_ptr + (row + token) * stride_row + head, (row + token < tokens) & (head < N), other=0.0)


@triton.jit
def load_keys(key_ptr, seen, KEYS: tl.constexpr, ALIGNED: tl.constexpr):
    """Float16 [KEYS, 128] of 2^-8 times the codes at uint8 pointers [KEYS]; zero if not `seen`."""
    return _decode(_load_words(key_ptr, seen, ALIGNED), KEYS)


@triton.jit
def load_paged_keys(
    cache_ptr, stride_cache_page, page, row, seen, P: tl.constexpr, KEYS: tl.constexpr, ALIGNED: tl.constexpr
):
    """`load_keys` and scales float32 [KEYS] of rows [KEYS] of `page`, one or [KEYS] of them; zeros if not `seen`."""
    page_ptr = cache_ptr + page.to(tl.int64) * stride_cache_page
    scale_ptr = page_ptr + P * 128 + row * 4
    if ALIGNED:
        scale = tl.load(scale_ptr.to(tl.pointer_type(tl.float32)), seen, other=0.0)
    else:
        byte = tl.arange(0, 4)[None, :]
        bits = tl.load(scale_ptr[:, None] + byte, seen[:, None], other=0).to(tl.int32) << (8 * byte)
        scale = tl.sum(bits, 1).to(tl.float32, bitcast=True)
    return load_keys(page_ptr + row * 128, seen, KEYS, ALIGNED), scale


@triton.jit
def score_tile(q, weights, keys, key_scale, KEYS: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr):
    """Float32 [KEYS, TOKENS]: key_scale * sum_h weight_h relu(q_h . k) of each token; NaN stays NaN."""
    heads = tl.maximum(tl.dot(keys, q), 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    eights = tl.sum(tl.reshape(heads, (KEYS, HEADS // _EIGHT, TOKENS, _EIGHT)), 1)
    return tl.sum(eights, 2) * 65536.0 * key_scale[:, None]


@triton.jit
def walk_of(lead, name, count, TOKENS: tl.constexpr):
    """The walk over keys that token `lead` of a block leads: for all tokens of its name, if it is the first that sees any.

    Args:
        name: int32 [TOKENS]; tokens of one name see the same keys, each its own number of them.
        count: int32 [TOKENS]; how many.

    Returns:
        its name; how many keys of the walk each token sees, [TOKENS]; how many there are, 0 if it leads none.
    """
    at = tl.arange(0, TOKENS)
    led = tl.sum(tl.where(at == lead, name, 0))
    seen = tl.where(name == led, count, 0)
    leads = tl.min(tl.where(seen > 0, at, TOKENS)) == lead
    return led, seen, tl.where(leads, tl.max(seen), 0)


@triton.jit
def fill_unseen(out_ptr, count, start, step, width, KEYS: tl.constexpr):
    """-inf to the columns from `count` on of rows at pointers [TOKENS], in every tile of KEYS at `start`, `start` + `step`
    and so on; none to a row whose count is at least `width`."""
    for base in range(tl.min(count) // step * step + start, width, step):
        column = base + tl.arange(0, KEYS)[:, None]
        unseen = (column >= count[None, :]) & (column < width)
        tl.store(out_ptr[None, :] + column, tl.full([KEYS, count.shape[0]], float("-inf"), tl.float32), unseen)


def words_are_aligned(codes: torch.Tensor, distance: int) -> bool:
    """Whether rows of codes, `distance` bytes apart, start where four codes can be loaded as one."""
    return codes.data_ptr() % 4 == 0 and distance % 4 == 0
