# SPDX-License-Identifier: Apache-2.0
"""The scores of query tokens against a tile of index keys, shared by the Triton kernels of the indexer.

An E4M3 code is 2^-8 of its value as a float16, exactly, so both operands go to the matrix unit without
their scales: the product is 2^-16 of the codes' product, and one exact factor restores it.

A program may own several tokens. It decodes a tile of keys once and multiplies it by one token after the other, each by
the same function, so that the tokens beside it change no bit of a score.
"""

import torch

from ..launch import tl, triton
from ..quantization.triton_codec import e4m3_words_to_half_shuffled

SHARED_REASON = "the float16 queries of six or eight tokens, 8 KiB each, and a tile of 128 keys"


def head_block(heads: int) -> int:
    """Columns of the query tile: a power of two, and 16 at least, which is what the matrix unit takes."""
    return max(16, triton.next_power_of_2(heads))


def words_are_aligned(codes: torch.Tensor, distance_bytes: int) -> bool:
    """Whether rows of codes at that distance start where four codes can be loaded as one word."""
    return codes.data_ptr() % 4 == 0 and distance_bytes % 4 == 0


def programs_a_row(device: torch.device, rows: int, tiles: int, per_multiprocessor: int) -> int:
    """Programs that share the tiles of each of `rows` rows of a grid.

    In all as many for each multiprocessor of the device as told, or one a row, whichever is more, and no more than it
    takes for the longest share.
    """
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    limit = max(1, per_multiprocessor * count // rows)
    return triton.cdiv(tiles, triton.cdiv(tiles, limit))


@triton.jit
def _load_numbers(row_ptr, seen, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """Float16 [ROWS, 128]: 2^-8 times the codes at each of uint8 pointers [ROWS], shuffled alike; 0 if not `seen`."""
    word = tl.arange(0, 32)
    if ALIGNED:
        words = tl.load(row_ptr.to(tl.pointer_type(tl.int32))[:, None] + word[None, :], seen[:, None], other=0)
    else:
        byte = tl.arange(0, 4)[None, None, :]
        codes = tl.load(row_ptr[:, None, None] + 4 * word[None, :, None] + byte, seen[:, None, None], other=0)
        words = tl.sum(codes.to(tl.int32) << (8 * byte), 2)
    # A branch whose sides are one and whose condition always holds. Triton looks back from a dot for the narrowest
    # load, lays the operand out for that, which costs bank conflicts, and moves all it passes into that layout, where
    # each warp decodes the whole tile again. It does not look back through a branch.
    if tl.num_programs(0) > 0:
        numbers = e4m3_words_to_half_shuffled(words, ROWS, 128)
    else:
        numbers = e4m3_words_to_half_shuffled(words, ROWS, 128)
    return numbers


@triton.jit
def load_queries(q_ptr, row, there, N: tl.constexpr, HEADS: tl.constexpr, ALIGNED: tl.constexpr):
    """Float16 [128, HEADS]: 2^-8 times the codes of token `row`; zero from N on, and if it is not `there`."""
    head = tl.arange(0, HEADS)
    return tl.trans(_load_numbers(q_ptr + (row * N + head) * 128, (head < N) & there, HEADS, ALIGNED))


@triton.jit
def load_weights(weights_ptr, there, N: tl.constexpr, HEADS: tl.constexpr):
    """Float32 [HEADS]; zero from N on, and if the token is not `there`."""
    head = tl.arange(0, HEADS)
    return tl.load(weights_ptr + head, (head < N) & there, other=0.0)


@triton.jit
def load_keys(key_ptr, seen, KEYS: tl.constexpr, ALIGNED: tl.constexpr):
    """Float16 [KEYS, 128]: 2^-8 times the codes at uint8 pointers [KEYS]; zero if not `seen`."""
    return _load_numbers(key_ptr, seen, KEYS, ALIGNED)


@triton.jit
def load_paged_keys(
    cache_ptr, stride_cache_page, page, row, seen, P: tl.constexpr, KEYS: tl.constexpr, ALIGNED: tl.constexpr
):
    """`load_keys` and the float32 scales [KEYS] of rows [KEYS] of `page`, one or [KEYS] of them; zero if not `seen`."""
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
def score_tile(q, weights, keys, key_scale):
    """Float32 [KEYS]: key_scale * sum_h weight_h relu(q_h . k); NaN stays NaN."""
    heads = tl.maximum(tl.dot(keys, q), 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    return tl.sum(heads, 1) * 65536.0 * key_scale


@triton.jit
def walk_of(lead, names, counts, TOKENS: tl.constexpr):
    """The walk over keys that token `lead` of a program leads, if it is the first token of its name that sees any.

    Args:
        names: TOKENS int32; tokens of one name see the same keys, each its own number of them.
        counts: TOKENS int32; how many, 0 or more.

    Returns:
        its name; how many keys of the walk each token sees; how many the walk has, 0 if `lead` leads none.
    """
    name = names[0]
    for i in tl.static_range(1, TOKENS):
        name = tl.where(lead == i, names[i], name)
    seen = ()
    columns, earlier = counts[0] * 0, counts[0] * 0
    for i in tl.static_range(TOKENS):
        count = tl.where(names[i] == name, counts[i], 0)
        columns = tl.maximum(columns, count)
        earlier = tl.maximum(earlier, tl.where(lead > i, count, 0))
        seen = seen + (count,)
    return name, seen, tl.where(earlier > 0, 0, columns)


@triton.jit
def fill_unseen(out_ptr, count, start, step, width, KEYS: tl.constexpr):
    """-inf to the columns of a row from `count` to `width`, in the tiles of KEYS at `start`, `start` + `step` and so on."""
    for base in range(count // step * step + start, width, step):
        column = base + tl.arange(0, KEYS)
        tl.store(out_ptr + column, tl.full([KEYS], float("-inf"), tl.float32), (column >= count) & (column < width))
