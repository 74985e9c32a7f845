# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the selection ops.

The k largest of a row are found in rounds: a program holds a chunk of the row in registers, finds the
chunk's k-th largest score bit by bit, and writes the columns of its k largest, ascending. The next round
chooses among those. A column can only lose to k better ones, and order and ties survive each round, so
the result is exact and does not depend on how programs are scheduled.

A program takes every n-th chunk up to what the row sees, which is read on the card: a captured graph is as
wide as the longest context that it may serve, and costs what the contexts of a step cost.
"""

import torch

from ..launch import Launch, aligned_rows, tl, triton
from ..order_key import BELOW_ALL, order_key

_CHUNK, _LANES_PER_WARP = 8192, 512
# Programs that the launchers aim at, whatever the width; each walks over chunks.
_PROGRAMS = 1024
_COPIED, _BLOCKS = 64, 256
_NONE = tl.constexpr(BELOW_ALL)


@triton.jit(
    do_not_specialize=["entries", "unit", "packed", "rounds", "stride_candidates_row"],
    do_not_specialize_on_alignment=["visible_ptr"],
)
def _largest_kernel(
    scores_ptr, columns_ptr, visible_ptr, candidates_ptr, out_ptr,
    stride_scores_row, stride_columns_row, stride_candidates_row, stride_out_row, entries, unit, packed, rounds,
    K: tl.constexpr, LISTED: tl.constexpr, BOUNDED: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    end = entries
    if BOUNDED:
        # What the row has in the first round, and what each round before this one left of it.
        end = tl.cdiv(tl.maximum(tl.load(visible_ptr + row), 0), unit) * packed
        for _ in range(rounds):
            end = tl.maximum(tl.cdiv(end, CHUNK), 1) * K
        end = tl.minimum(end, entries)
    lane = tl.arange(0, CHUNK)
    scores_ptr += row * stride_scores_row
    columns_ptr += row * stride_columns_row
    out_ptr += row * stride_out_row
    for chunk in range(tl.program_id(1), tl.maximum(tl.cdiv(end, CHUNK), 1), tl.num_programs(1)):
        entry = chunk * CHUNK + lane
        if LISTED:
            column = tl.load(columns_ptr + entry, entry < end, other=-1)
        else:
            column = tl.where(entry < end, entry, -1)
        score = tl.load(scores_ptr + column, column >= 0, other=float("-inf"))
        key = tl.where((score == score) & (score > float("-inf")), order_key(score), _NONE)
        # A threshold that k keys reach and no more, or the largest that k reach, from its highest bit down; `_NONE` if no
        # more than k keys exist, where there is nothing to look for.
        threshold = tl.full([], _NONE, tl.int32)
        bit = tl.where(tl.sum((key != _NONE).to(tl.int32), 0) > K, threshold, 0)
        while bit != 0:
            raised = threshold ^ bit
            reached = tl.sum((key >= raised).to(tl.int32), 0)
            threshold = tl.where(reached >= K, raised, threshold)
            bit = tl.where(reached == K, 0, (bit >> 1) & 0x7FFFFFFF)
        above = key > threshold
        equal = (key == threshold) & (key != _NONE)
        room = K - tl.sum(above.to(tl.int32), 0)
        kept = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        chosen_ptr = out_ptr + chunk * K
        tl.store(chosen_ptr + place, column, kept)
        count = tl.sum(kept.to(tl.int32), 0)
        tl.store(chosen_ptr + lane, tl.full([CHUNK], -1, tl.int32), (lane >= count) & (lane < K))
        if SIZE:
            # From columns to rows once they are packed: K of them take a thread fewer registers than a chunk.
            tl.debug_barrier()
            chosen = tl.arange(0, triton.next_power_of_2(K))
            column = tl.load(chosen_ptr + chosen, chosen < count, other=0)
            block = tl.load(candidates_ptr + row * stride_candidates_row + column // SIZE, chosen < count, other=0)
            tl.store(chosen_ptr + chosen, block * SIZE + column % SIZE, chosen < count)


def chunk_entries(k: int) -> int:
    """Entries of a row that one program looks at."""
    return max(_CHUNK, triton.next_power_of_2(2 * k))


def _largest(scores, k, visible=None, unit=1, packed=1, candidates=None):
    """Columns of the k largest of each row, or the rows that `candidates` says they are.

    A row has ceil(visible / unit) * packed columns, or all; where `candidates` is given, `packed` is its block size.
    """
    rows, entries = scores.shape
    chunk = chunk_entries(k)
    columns, rounds = None, 0
    while columns is None or columns.shape[1] > k:
        chunks = max(1, triton.cdiv(entries, chunk))
        out = torch.empty(rows, chunks * k, dtype=torch.int32, device=scores.device)
        # The last round writes rows; the rounds before it, columns of the scores.
        named = candidates if chunks == 1 else None
        if rows:
            _largest_kernel[(rows, min(chunks, max(1, _PROGRAMS // rows)))](
                scores, out if columns is None else columns, out if visible is None else visible,
                out if named is None else named, out,
                scores.stride(0), 0 if columns is None else columns.stride(0), 0 if named is None else named.stride(0),
                out.stride(0), entries, unit, packed, rounds,
                K=k, LISTED=columns is not None, BOUNDED=visible is not None, SIZE=0 if named is None else packed,
                CHUNK=chunk, num_warps=min(32, chunk // _LANES_PER_WARP),
            )
        columns, entries, rounds = out, out.shape[1], rounds + 1
    return columns


def select_topk_triton(
    scores: torch.Tensor,
    k: int,
    visible: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
    block_size: int = 1,
) -> torch.Tensor:
    """See `select_topk`."""
    size = 1 if candidates is None else block_size
    return _largest(scores, k, visible, unit=size, packed=size, candidates=candidates)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["visible_ptr"])
def _block_scores_kernel(
    scores_ptr, visible_ptr, best_ptr, stride_scores_row, stride_best_row, width,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = tl.minimum(tl.maximum(tl.load(visible_ptr + row), 0), width)
    count = tl.cdiv(visible, SIZE)
    member = tl.arange(0, SIZE_PADDED)[None, :]
    for base in range(tl.program_id(1) * BLOCKS, count, tl.num_programs(1) * BLOCKS):
        block = base + tl.arange(0, BLOCKS)
        column = block.to(tl.int64)[:, None] * SIZE + member
        read = (member < SIZE) & (column < visible)
        score = tl.load(scores_ptr + row * stride_scores_row + column, read, other=float("-inf"))
        score = tl.where(score == score, score, float("-inf"))
        # Only the newest block is infinite: it wins over every score.
        best = tl.minimum(tl.max(score, 1), 3.4028234663852886e38)
        best = tl.where(block == count - 1, float("inf"), best)
        tl.store(best_ptr + row * stride_best_row + block, best, block < count)


def candidate_blocks_triton(scores: torch.Tensor, visible: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """See `candidate_blocks`."""
    rows, width = scores.shape
    count = triton.cdiv(width, block_size)
    best = aligned_rows(scores, rows, count)
    if best.numel():
        _block_scores_kernel[(rows, min(triton.cdiv(count, _BLOCKS), max(1, _PROGRAMS // rows)))](
            scores, visible, best, scores.stride(0), best.stride(0), width,
            SIZE=block_size, SIZE_PADDED=triton.next_power_of_2(block_size), BLOCKS=_BLOCKS, num_warps=4,
        )
    return _largest(best, blocks, visible, unit=block_size)


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
                "columns_ptr": "*i32:16", "visible_ptr": "*i32", "candidates_ptr": "*i32:16", "out_ptr": "*i32:16",
                "stride_columns_row": "i32:16", "stride_candidates_row": "i32", "stride_out_row": "i32:16",
                "entries": "i32", "unit": "i32", "packed": "i32", "rounds": "i32",
            },
            {"K": k, "LISTED": listed, "BOUNDED": True, "SIZE": size, "CHUNK": _CHUNK},
            num_warps=_CHUNK // _LANES_PER_WARP,
        )
        for k, size in ((512, 0), (512, 8), (2048, 0))
        for listed in (False, True)
    ),
    Launch(
        _block_scores_kernel,
        _SCORES | {
            "visible_ptr": "*i32", "best_ptr": "*fp32:16", "stride_best_row": "i32:16", "width": "i32",
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
