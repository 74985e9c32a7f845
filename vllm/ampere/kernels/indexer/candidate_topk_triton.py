# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the selection ops.

The k largest of a row are found in rounds: a program holds a chunk of the row in registers, finds the
chunk's k-th largest score bit by bit, and writes the columns of its k largest, ascending. The next round
chooses among those. A column can only lose to k better ones, and order and ties survive each round, so
the result is exact and does not depend on how programs are scheduled.
"""

import torch

from ..launch import Launch, aligned_rows, tl, triton
from ..order_key import BELOW_ALL, order_key

_CHUNK, _LANES_PER_WARP = 8192, 512
_COPIED, _BLOCKS = 64, 256
_NONE = tl.constexpr(BELOW_ALL)


@triton.jit(do_not_specialize=["entries", "stride_candidates_row"])
def _largest_kernel(
    scores_ptr, columns_ptr, candidates_ptr, out_ptr,
    stride_scores_row, stride_columns_row, stride_candidates_row, stride_out_row, entries,
    K: tl.constexpr, LISTED: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, CHUNK)
    entry = chunk * CHUNK + lane
    if LISTED:
        column = tl.load(columns_ptr + row * stride_columns_row + entry, entry < entries, other=-1)
    else:
        column = tl.where(entry < entries, entry, -1)
    score = tl.load(scores_ptr + row * stride_scores_row + column, column >= 0, other=float("-inf"))
    key = tl.where((score == score) & (score > float("-inf")), order_key(score), _NONE)
    # The largest threshold that k keys reach, from its highest bit down; `_NONE` if fewer than k exist.
    threshold = tl.full([], _NONE, tl.int32)
    bit = tl.full([], _NONE, tl.int32)
    for _ in range(32):
        raised = threshold ^ bit
        threshold = tl.where(tl.sum((key >= raised).to(tl.int32), 0) >= K, raised, threshold)
        bit = (bit >> 1) & 0x7FFFFFFF
    above = key > threshold
    equal = (key == threshold) & (key != _NONE)
    room = K - tl.sum(above.to(tl.int32), 0)
    kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    out_ptr += row * stride_out_row + chunk * K
    tl.store(out_ptr + place, column, kept)
    count = tl.sum(kept.to(tl.int32), 0)
    tl.store(out_ptr + lane, tl.full([CHUNK], -1, tl.int32), (lane >= count) & (lane < K))
    if SIZE:
        # From columns to rows once they are packed: K of them take a thread fewer registers than a chunk.
        tl.debug_barrier()
        chosen = tl.arange(0, triton.next_power_of_2(K))
        column = tl.load(out_ptr + chosen, chosen < count, other=0)
        block = tl.load(candidates_ptr + row * stride_candidates_row + column // SIZE, chosen < count, other=0)
        tl.store(out_ptr + chosen, block * SIZE + column % SIZE, chosen < count)


def chunk_entries(k: int) -> int:
    """Entries of a row that one program looks at."""
    return max(_CHUNK, triton.next_power_of_2(2 * k))


def select_topk_triton(
    scores: torch.Tensor, k: int, candidates: torch.Tensor | None = None, block_size: int = 1
) -> torch.Tensor:
    """See `select_topk`."""
    rows, entries = scores.shape
    chunk = chunk_entries(k)
    columns = None
    while columns is None or columns.shape[1] > k:
        chunks = max(1, triton.cdiv(entries, chunk))
        out = torch.empty(rows, chunks * k, dtype=torch.int32, device=scores.device)
        # The last round writes rows; the rounds before it, columns of the scores.
        named = candidates if chunks == 1 else None
        if rows:
            _largest_kernel[(rows, chunks)](
                scores, out if columns is None else columns, out if named is None else named, out,
                scores.stride(0), 0 if columns is None else columns.stride(0), 0 if named is None else named.stride(0),
                out.stride(0), entries,
                K=k, LISTED=columns is not None, SIZE=0 if named is None else block_size, CHUNK=chunk,
                num_warps=min(32, chunk // _LANES_PER_WARP),
            )
        columns, entries = out, out.shape[1]
    return columns


@triton.jit(do_not_specialize=["width", "count"], do_not_specialize_on_alignment=["visible_ptr"])
def _block_scores_kernel(
    scores_ptr, visible_ptr, best_ptr, stride_scores_row, stride_best_row, width, count,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.load(visible_ptr + row), width)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    member = tl.arange(0, SIZE_PADDED)[None, :]
    column = block.to(tl.int64)[:, None] * SIZE + member
    read = (member < SIZE) & (column < visible)
    score = tl.load(scores_ptr + row * stride_scores_row + column, read, other=float("-inf"))
    score = tl.where(score == score, score, float("-inf"))
    best = tl.max(score, 1)
    # Only the newest block is infinite: it wins over every score.
    best = tl.minimum(best, 3.4028234663852886e38)
    newest = (visible > 0) & (block == (visible - 1) // SIZE)
    tl.store(best_ptr + row * stride_best_row + block, tl.where(newest, float("inf"), best), block < count)


def candidate_blocks_triton(scores: torch.Tensor, visible: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """See `candidate_blocks`."""
    rows, width = scores.shape
    count = triton.cdiv(width, block_size)
    best = aligned_rows(scores, rows, count)
    if best.numel():
        _block_scores_kernel[(rows, triton.cdiv(count, _BLOCKS))](
            scores, visible, best, scores.stride(0), best.stride(0), width, count,
            SIZE=block_size, SIZE_PADDED=triton.next_power_of_2(block_size), BLOCKS=_BLOCKS, num_warps=4,
        )
    return select_topk_triton(best, blocks)


@triton.jit(do_not_specialize=["stride_candidates_row", "width", "listed"])
def _copy_blocks_kernel(
    scores_ptr, candidates_ptr, out_ptr, stride_scores_row, stride_candidates_row, stride_out_row, width, listed,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    block = tl.load(candidates_ptr + row * stride_candidates_row + at, at < listed, other=-1)
    member = tl.arange(0, SIZE_PADDED)[None, :]
    column = block.to(tl.int64)[:, None] * SIZE + member
    copied = (block >= 0)[:, None] & (member < SIZE) & (column < width)
    score = tl.load(scores_ptr + row * stride_scores_row + column, copied)
    tl.store(out_ptr + row * stride_out_row + column, score, copied)


def mask_to_candidates_triton(scores: torch.Tensor, candidates: torch.Tensor, block_size: int) -> torch.Tensor:
    """See `mask_to_candidates`."""
    rows, width = scores.shape
    out = aligned_rows(scores, rows, width).fill_(float("-inf"))
    listed = candidates.shape[1]
    if out.numel() and listed:
        _copy_blocks_kernel[(rows, triton.cdiv(listed, _COPIED))](
            scores, candidates, out, scores.stride(0), candidates.stride(0), out.stride(0), width, listed,
            SIZE=block_size, SIZE_PADDED=triton.next_power_of_2(block_size), BLOCKS=_COPIED, num_warps=4,
        )
    return out


_SCORES = {"scores_ptr": "*fp32:16", "stride_scores_row": "i32:16"}
COMPILES = (
    *(
        Launch(
            _largest_kernel,
            _SCORES | {
                "columns_ptr": "*i32:16", "candidates_ptr": "*i32:16", "out_ptr": "*i32:16",
                "stride_columns_row": "i32:16", "stride_candidates_row": "i32", "stride_out_row": "i32:16",
                "entries": "i32",
            },
            {"K": k, "LISTED": listed, "SIZE": size, "CHUNK": _CHUNK},
            num_warps=_CHUNK // _LANES_PER_WARP,
        )
        for k, size in ((512, 0), (512, 8), (2048, 0))
        for listed in (False, True)
    ),
    Launch(
        _block_scores_kernel,
        _SCORES | {
            "visible_ptr": "*i32", "best_ptr": "*fp32:16", "stride_best_row": "i32:16", "width": "i32",
            "count": "i32",
        },
        {"SIZE": 8, "SIZE_PADDED": 8, "BLOCKS": _BLOCKS},
    ),
    Launch(
        _copy_blocks_kernel,
        _SCORES | {
            "candidates_ptr": "*i32:16", "out_ptr": "*fp32:16", "stride_candidates_row": "i32",
            "stride_out_row": "i32:16", "width": "i32", "listed": "i32",
        },
        {"SIZE": 8, "SIZE_PADDED": 8, "BLOCKS": _COPIED},
    ),
)
