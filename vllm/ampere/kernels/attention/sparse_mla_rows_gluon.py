# SPDX-License-Identifier: Apache-2.0
"""`sparse_mla_rows` with its copies and barriers written out, for ranks of few heads.

Triton's pipeline holds one tile of rows a program, since the tile serves both products, and waits for it. Here the next
tile is on its way while one is multiplied. Keys are the rows of both products and heads the columns, of which the matrix
unit takes eight. Four warps share a tile of 32 rows: for the logits, two halves of the 512 dimensions times two of the
rows; for the result, four parts of the dimensions. Between the two, the halves of the logits change hands in shared memory
once, into a layout in which every warp has them all, so that the soft-max needs no other exchange.
"""

from ..launch import Launch, async_copy, gl, gluon, mma_v2, triton

_LOG2_E = gl.constexpr(1.4426950408889634)
_LOWEST = gl.constexpr(-1e30)
_ROWS = gl.constexpr(32)
_STAGES = 2


@gluon.jit
def _copy_tile(tile, rows_ptr, row, stride_row, offs):
    """Start copying the rows of a tile into [4, rows, 128]; a negative one leaves zeros."""
    row = row[None, :, None]
    # 32 bits times 32: one instruction.
    source = rows_ptr + row.to(gl.uint32).to(gl.uint64) * stride_row.to(gl.uint32).to(gl.uint64) + offs
    async_copy.async_copy_global_to_shared(tile, source, mask=row >= 0)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["width"])
def _sparse_mla_rows_gluon_kernel(
    q_ptr, sink_ptr, rows_ptr, indices_ptr, lens_ptr, out_ptr, scale,
    stride_q_tok, stride_q_head, stride_row, stride_indices_tok, stride_out_tok, stride_out_head, width,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, STAGES: gl.constexpr,
):
    """One program of four warps owns one token and a block of its heads, and walks the token's list tile by tile."""
    head_blocks: gl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [2, 1, 16], [1, 4, 1], [2, 1, 0])
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    # [half, row, head] as the second operand of the result's product has them, alike in all warps, both halves in a thread.
    columns: gl.constexpr = [[0, 0, 8]] if BLOCK_H == 16 else []
    HALVES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 8, 0], [0, 16, 0]] + columns + [[1, 0, 0]],
        [[0, 2, 0], [0, 4, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 0, 0], [0, 0, 0]], [], [2, _ROWS, BLOCK_H],
    )  # fmt: skip
    WEIGHTS: gl.constexpr = gl.SliceLayout(0, HALVES)
    BY_HEAD: gl.constexpr = gl.SliceLayout(0, WEIGHTS)
    FACTOR: gl.constexpr = gl.SliceLayout(0, RESULT)

    token = (gl.program_id(0) // head_blocks).to(gl.int64)
    first_head = gl.program_id(0) % head_blocks * BLOCK_H
    left = gl.minimum(gl.load(lens_ptr + token), width)
    tiles = (gl.maximum(left, 0) + _ROWS - 1) // _ROWS
    indices_ptr += token * stride_indices_tok

    # The same bytes three times: as the copies fill them, as the logits' product reads them, and as the result's does.
    kept = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 4, _ROWS, 128], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    pairs = kept._reinterpret(gl.bfloat16, [STAGES * 2, 2, _ROWS, 128], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    parts = kept._reinterpret(gl.bfloat16, [STAGES * 4, _ROWS, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    copy_n = gl.arange(0, _ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    part = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, COPY)))
    within = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, COPY)))
    offs = part[:, None, None] * 128 + within[None, None, :]
    ahead = indices_ptr + copy_n
    for stage in gl.static_range(STAGES):
        row = gl.load(ahead + stage * _ROWS, mask=copy_n < left - stage * _ROWS, other=-1)
        _copy_tile(kept.index(stage), rows_ptr, row, stride_row, offs)
    ahead += STAGES * _ROWS
    next_row = gl.load(ahead, mask=copy_n < left - STAGES * _ROWS, other=-1)

    QUERY: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 16, 2], [2, 1, 2], [1, 2, 0])
    q_half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))[:, None, None]
    q_d = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))[None, :, None]
    q_h = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))[None, None, :]
    q_row = q_ptr + token * stride_q_tok + q_h.to(gl.int64) * stride_q_head + q_half * 128 + q_d
    q_low = gl.convert_layout(gl.load(q_row, mask=q_h < HEADS, other=0.0), gl.DotOperandLayout(1, LOGITS, 2))
    q_high = gl.convert_layout(gl.load(q_row + 256, mask=q_h < HEADS, other=0.0), gl.DotOperandLayout(1, LOGITS, 2))

    acc_a = gl.zeros([128, BLOCK_H], gl.float32, RESULT)
    acc_b = gl.zeros([128, BLOCK_H], gl.float32, RESULT)
    acc_c = gl.zeros([128, BLOCK_H], gl.float32, RESULT)
    acc_d = gl.zeros([128, BLOCK_H], gl.float32, RESULT)
    peak = gl.full([BLOCK_H], _LOWEST, gl.float32, BY_HEAD)
    total = gl.zeros([BLOCK_H], gl.float32, BY_HEAD)
    zeros = gl.zeros([2, _ROWS, BLOCK_H], gl.float32, LOGITS)
    log2_scale = scale * _LOG2_E
    offs_n = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, WEIGHTS))
    indices = indices_ptr + offs_n

    for tile in range(0, tiles):
        counts = gl.load(indices, mask=offs_n < left, other=-1) >= 0
        slot = tile % STAGES
        async_copy.wait_group(STAGES - 1)
        # Two chains of products of one half each, not one that is twice as long.
        low = mma_v2(pairs.index(slot * 2).load(gl.DotOperandLayout(0, LOGITS, 2)), q_low, zeros)
        high = mma_v2(pairs.index(slot * 2 + 1).load(gl.DotOperandLayout(0, LOGITS, 2)), q_high, zeros)
        logits = gl.sum(gl.convert_layout(low + high, HALVES), 0) * log2_scale
        logits = gl.where(counts[:, None], logits, _LOWEST)
        higher = gl.maximum(peak, gl.max(logits, 0))
        # A tile of holes only would otherwise weigh e^0 each.
        weights = gl.where(counts[:, None], gl.exp2(logits - higher[None, :]), 0.0)
        shrink = gl.exp2(peak - higher)
        total = total * shrink + gl.sum(weights, 0)
        peak = higher
        weights = gl.convert_layout(weights.to(gl.bfloat16), gl.DotOperandLayout(1, RESULT, 2))
        shrink = gl.convert_layout(shrink, FACTOR)[None, :]
        VALUES: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
        acc_a = mma_v2(parts.index(slot * 4).permute([1, 0]).load(VALUES), weights, acc_a * shrink)
        acc_b = mma_v2(parts.index(slot * 4 + 1).permute([1, 0]).load(VALUES), weights, acc_b * shrink)
        acc_c = mma_v2(parts.index(slot * 4 + 2).permute([1, 0]).load(VALUES), weights, acc_c * shrink)
        acc_d = mma_v2(parts.index(slot * 4 + 3).permute([1, 0]).load(VALUES), weights, acc_d * shrink)
        _copy_tile(kept.index(slot), rows_ptr, next_row, stride_row, offs)
        indices += _ROWS
        ahead += _ROWS
        left -= _ROWS
        next_row = gl.load(ahead, mask=copy_n < left - STAGES * _ROWS, other=-1)
    async_copy.wait_group(0)

    offs_h = first_head + gl.arange(0, BLOCK_H, layout=BY_HEAD)
    sink = gl.load(sink_ptr + offs_h, mask=offs_h < HEADS, other=0.0) * _LOG2_E
    top = gl.maximum(peak, sink)
    last = gl.exp2(peak - top)
    # Compared with zero, not by order: a NaN among the rows has to reach the result.
    factor = last / gl.where(total == 0.0, 1.0, total * last + gl.exp2(sink - top))
    factor = gl.convert_layout(factor, FACTOR)[None, :]
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, 4], [0, 1])
    out_h = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(0, OUT))[None, :]
    out_d = gl.arange(0, 128, layout=gl.SliceLayout(1, OUT))[:, None]
    out_row = out_ptr + token * stride_out_tok + out_h.to(gl.int64) * stride_out_head + out_d
    gl.store(out_row, gl.convert_layout((acc_a * factor).to(gl.bfloat16), OUT), mask=out_h < HEADS)
    gl.store(out_row + 128, gl.convert_layout((acc_b * factor).to(gl.bfloat16), OUT), mask=out_h < HEADS)
    gl.store(out_row + 256, gl.convert_layout((acc_c * factor).to(gl.bfloat16), OUT), mask=out_h < HEADS)
    gl.store(out_row + 384, gl.convert_layout((acc_d * factor).to(gl.bfloat16), OUT), mask=out_h < HEADS)


def _block_h(heads: int) -> int:
    return 8 if heads <= 8 else 16


def launch_rows(tokens: int, heads: int, arguments: tuple) -> None:
    """Launch on the arguments that both kernels of the op take; at least one token."""
    block_h = _block_h(heads)
    _sparse_mla_rows_gluon_kernel[(tokens * triton.cdiv(heads, block_h),)](
        *arguments, HEADS=heads, BLOCK_H=block_h, STAGES=_STAGES, num_warps=4
    )


def launch(types: dict[str, str], heads: int) -> Launch:
    """What the compile tier builds, for argument types that both kernels of the op have."""
    return Launch(
        _sparse_mla_rows_gluon_kernel, types, {"HEADS": heads, "BLOCK_H": _block_h(heads), "STAGES": _STAGES}, num_warps=4,
        shared_reason="two tiles of 32 rows are 64 KiB: one on its way while the other is multiplied",
    )  # fmt: skip
