# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind `sparse_mla_decode` and `sparse_mla_prefill`.

One program owns one token, a block of its heads and one split of its keys. The keys of a token are two lists laid end
to end in tiles, the window's and then the compressed; a split takes an equal share of the tiles that the token's
lengths call for, so short lists cost short loops. A tile's rows are decoded once for all heads of the block, and serve
both products. With one split the program counts the sink and writes the result; otherwise it writes its normalised
part and the logarithm of its denominator for `merge_attn_states`.

Keys are the rows of both products and heads the columns: the matrix unit takes eight columns, so a rank's 8 heads are
not padded. The 512 dimensions are three times 128, 64 and the 64 rotary ones, powers of two all, so none needs a mask.
All but the last stay 1/256 of their numbers, which is how a code decodes without a factor of its own.
"""

import torch

from ... import arch
from ..kv_cache.triton_record import decode_256th, load_codes, load_rope, record_pointers
from ..launch import Launch, tl, triton
from .merge_attn_states import _merge_attn_states_triton

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)
_BLOCK_N = 16
_NUM_WARPS = 4
# Tokens times heads up to which a token's heads are spread over more programs.
_FEW_HEADS = 64

_RUN_TIME = ["stride_window_tok", "stride_compressed_tok", "window_width", "compressed_width", "tokens", "splits"]
_LISTS = ["window_slots_ptr", "window_lens_ptr", "compressed_slots_ptr", "compressed_lens_ptr"]


@triton.jit
def _load_tile(
    tile, last, window_tiles, window_ptr, window_slots_ptr, window_len, stride_window_page, window_rows,
    compressed_ptr, compressed_slots_ptr, compressed_len, stride_compressed_page, compressed_rows, BLOCK_N: tl.constexpr,
):
    """Which entries of a tile of the two lists count, none from tile `last` on, and the bytes of their records."""
    in_window = tile < window_tiles
    offs = (tile - tl.where(in_window, 0, window_tiles)) * BLOCK_N + tl.arange(0, BLOCK_N)
    length = tl.where(tile < last, tl.where(in_window, window_len, compressed_len), 0)
    slots_ptr = tl.where(in_window, window_slots_ptr, compressed_slots_ptr)
    slots = tl.load(slots_ptr + offs, mask=offs < length, other=-1)
    counts = slots >= 0
    cache_ptr = tl.where(in_window, window_ptr, compressed_ptr)
    stride_page = tl.where(in_window, stride_window_page, stride_compressed_page)
    page_rows = tl.where(in_window, window_rows, compressed_rows)
    data_ptr, scale_ptr = record_pointers(cache_ptr, tl.maximum(slots, 0), stride_page, page_rows)
    codes_a, scales_a = load_codes(data_ptr, scale_ptr, counts, 0, 128)
    codes_b, scales_b = load_codes(data_ptr, scale_ptr, counts, 128, 128)
    codes_c, scales_c = load_codes(data_ptr, scale_ptr, counts, 256, 128)
    codes_d, scales_d = load_codes(data_ptr, scale_ptr, counts, 384, 64)
    return counts, codes_a, scales_a, codes_b, scales_b, codes_c, scales_c, codes_d, scales_d, load_rope(data_ptr, counts)


@triton.jit
def _soften(logits, counts, peak, total):
    """A tile's weights, in bfloat16, by the highest logit so far; that, what shrinks earlier sums, and their new total."""
    logits = tl.where(counts[:, None], logits, _LOWEST)
    higher = tl.maximum(peak, tl.max(logits, 0))
    # A tile of holes only would otherwise weigh e^0 each.
    weights = tl.where(counts[:, None], tl.exp2(logits - higher[None, :]), 0.0)
    shrink = tl.exp2(peak - higher)
    return weights.to(tl.bfloat16), higher, shrink, total * shrink + tl.sum(weights, 0)


@triton.jit(do_not_specialize=_RUN_TIME, do_not_specialize_on_alignment=_LISTS)
def _sparse_mla_decode_kernel(
    q_ptr,
    sink_ptr,
    window_ptr,
    window_slots_ptr,
    window_lens_ptr,
    compressed_ptr,
    compressed_slots_ptr,
    compressed_lens_ptr,
    out_ptr,
    lse_ptr,
    scale,
    stride_q_tok,
    stride_q_head,
    stride_window_page,
    stride_window_tok,
    stride_compressed_page,
    stride_compressed_tok,
    stride_out_split,
    stride_out_tok,
    stride_out_head,
    window_rows,
    compressed_rows,
    window_width,
    compressed_width,
    tokens,
    splits,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`out_ptr` is the bfloat16 result, or with SPLIT the float32 parts [splits, tokens, HEADS, 512]."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    offs_h = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    is_head = (offs_h < HEADS)[None, :]

    window_len = tl.minimum(tl.load(window_lens_ptr + token), window_width)
    window_tiles = (tl.maximum(window_len, 0) + BLOCK_N - 1) // BLOCK_N
    compressed_len = tl.minimum(tl.load(compressed_lens_ptr + token), compressed_width)
    tiles = window_tiles + (tl.maximum(compressed_len, 0) + BLOCK_N - 1) // BLOCK_N
    share = (tiles + splits - 1) // splits
    first = split * share
    last = tl.minimum(first + share, tiles)

    offs_128, offs_64 = tl.arange(0, 128)[:, None], tl.arange(0, 64)[:, None]
    q_row = q_ptr + token * stride_q_tok + offs_h.to(tl.int64)[None, :] * stride_q_head
    q_a = tl.load(q_row + offs_128, mask=is_head, other=0.0)
    q_b = tl.load(q_row + 128 + offs_128, mask=is_head, other=0.0)
    q_c = tl.load(q_row + 256 + offs_128, mask=is_head, other=0.0)
    q_d = tl.load(q_row + 384 + offs_64, mask=is_head, other=0.0)
    q_rope = tl.load(q_row + 448 + offs_64, mask=is_head, other=0.0)
    q_rope = (q_rope.to(tl.float32) / 256).to(tl.bfloat16)
    acc_a = tl.zeros([128, BLOCK_H], tl.float32)
    acc_b = tl.zeros([128, BLOCK_H], tl.float32)
    acc_c = tl.zeros([128, BLOCK_H], tl.float32)
    acc_d = tl.zeros([64, BLOCK_H], tl.float32)
    acc_rope = tl.zeros([64, BLOCK_H], tl.float32)
    peak = tl.full([BLOCK_H], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    log2_scale = scale * 256 * _LOG2_E

    window_slots_ptr += token * stride_window_tok
    compressed_slots_ptr += token * stride_compressed_tok
    counts, codes_a, scales_a, codes_b, scales_b, codes_c, scales_c, codes_d, scales_d, k_rope = _load_tile(
        first, last, window_tiles, window_ptr, window_slots_ptr, window_len, stride_window_page, window_rows,
        compressed_ptr, compressed_slots_ptr, compressed_len, stride_compressed_page, compressed_rows, BLOCK_N,
    )
    for tile in range(first, last):
        # The next tile is on its way while this one is multiplied. That a tile comes from the turn before also keeps
        # Triton from decoding it once for each product, in a layout that it derives from the width of the codes.
        (
            next_counts, next_codes_a, next_scales_a, next_codes_b, next_scales_b,
            next_codes_c, next_scales_c, next_codes_d, next_scales_d, next_rope,
        ) = _load_tile(
            tile + 1, last, window_tiles, window_ptr, window_slots_ptr, window_len, stride_window_page, window_rows,
            compressed_ptr, compressed_slots_ptr, compressed_len, stride_compressed_page, compressed_rows, BLOCK_N,
        )  # fmt: skip
        k_a = decode_256th(codes_a, scales_a, BLOCK_N, 128).to(tl.bfloat16)
        k_b = decode_256th(codes_b, scales_b, BLOCK_N, 128).to(tl.bfloat16)
        k_c = decode_256th(codes_c, scales_c, BLOCK_N, 128).to(tl.bfloat16)
        k_d = decode_256th(codes_d, scales_d, BLOCK_N, 64).to(tl.bfloat16)

        logits = tl.dot(k_a, q_a)
        logits = tl.dot(k_b, q_b, logits)
        logits = tl.dot(k_c, q_c, logits)
        logits = tl.dot(k_d, q_d, logits)
        logits = tl.dot(k_rope, q_rope, logits) * log2_scale
        # A branch whose sides are one and whose condition always holds. Triton lays the first of two products that follow
        # each other along one axis of warps: with 16 keys all four would compute all of it. It does not look through this.
        if tl.num_programs(0) > 0:
            weights, peak, shrink, total = _soften(logits, counts, peak, total)
        else:
            weights, peak, shrink, total = _soften(logits, counts, peak, total)
        acc_a = tl.dot(tl.trans(k_a), weights, acc_a * shrink[None, :])
        acc_b = tl.dot(tl.trans(k_b), weights, acc_b * shrink[None, :])
        acc_c = tl.dot(tl.trans(k_c), weights, acc_c * shrink[None, :])
        acc_d = tl.dot(tl.trans(k_d), weights, acc_d * shrink[None, :])
        acc_rope = tl.dot(tl.trans(k_rope), weights, acc_rope * shrink[None, :])
        counts, k_rope = next_counts, next_rope
        codes_a, codes_b, codes_c, codes_d = next_codes_a, next_codes_b, next_codes_c, next_codes_d
        scales_a, scales_b, scales_c, scales_d = next_scales_a, next_scales_b, next_scales_c, next_scales_d

    # Compared with zero, not by order: a NaN among the keys has to reach the result.
    empty = total == 0.0
    out_row = out_ptr + token * stride_out_tok + offs_h.to(tl.int64)[None, :] * stride_out_head
    if SPLIT:
        factor = 1.0 / tl.where(empty, 1.0, total)
        out_row += split.to(tl.int64) * stride_out_split
        lse = tl.where(empty, -float("inf"), (peak + tl.log2(tl.where(empty, 1.0, total))) * _LN_2)
        tl.store(lse_ptr + (split.to(tl.int64) * tokens + token) * HEADS + offs_h, lse, mask=offs_h < HEADS)
    else:
        sink = tl.load(sink_ptr + offs_h, mask=offs_h < HEADS, other=0.0) * _LOG2_E
        top = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - top)
        factor = shrink / tl.where(empty, 1.0, total * shrink + tl.exp2(sink - top))
    dtype = out_ptr.dtype.element_ty
    factor_nope = factor * 256
    tl.store(out_row + offs_128, (acc_a * factor_nope[None, :]).to(dtype), mask=is_head)
    tl.store(out_row + 128 + offs_128, (acc_b * factor_nope[None, :]).to(dtype), mask=is_head)
    tl.store(out_row + 256 + offs_128, (acc_c * factor_nope[None, :]).to(dtype), mask=is_head)
    tl.store(out_row + 384 + offs_64, (acc_d * factor_nope[None, :]).to(dtype), mask=is_head)
    tl.store(out_row + 448 + offs_64, (acc_rope * factor[None, :]).to(dtype), mask=is_head)


def _block_h(tokens: int, heads: int) -> int:
    """Heads of one program.

    A rank's 8 heads are one block. Of few tokens, many heads go in blocks of 16, more programs for a card that would
    not fill; of many in blocks of 32, which decode each key half as often.
    """
    most = 16 if tokens * heads <= _FEW_HEADS else 32
    return min(most, max(8, triton.next_power_of_2(heads)))


def split_count(tokens: int, heads: int, keys: int, multiprocessors: int) -> int:
    """How many parts each token's keys are split into: enough programs to fill the card, and a tile of keys for each.

    Args:
        tokens, heads: sizes of the call, both at least 1.
        keys: entries of both lists, whether they count or not.
        multiprocessors: of the card that is to be filled.
    """
    programs = tokens * -(-heads // _block_h(tokens, heads))
    most = max(1, _programs_per_multiprocessor(heads) * multiprocessors // programs)
    tiles = max(1, -(-keys // _BLOCK_N))
    share = -(-tiles // most)
    return -(-tiles // share)


def _programs_per_multiprocessor(heads: int) -> int:
    return 3 if heads <= 8 else 2


def attend(
    q,
    sink,
    scale,
    window_cache,
    window_slots,
    window_lens,
    compressed_cache,
    compressed_slots,
    compressed_lens,
    out,
    splits: int,
) -> torch.Tensor:
    """Attend with a given number of splits; the other arguments are those of `sparse_mla_decode`, checked."""
    tokens, heads, dim = q.shape
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return out
    compressed_width = 0
    if compressed_cache is None:
        compressed_cache, compressed_slots, compressed_lens = window_cache, window_slots, window_lens
    else:
        compressed_width = compressed_slots.shape[1]
    part, lse = out.unsqueeze(0), sink
    if splits > 1:
        part = torch.empty(splits, tokens, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    block_h = _block_h(tokens, heads)
    _sparse_mla_decode_kernel[(tokens * triton.cdiv(heads, block_h), splits)](
        q,
        sink,
        window_cache,
        window_slots,
        window_lens,
        compressed_cache,
        compressed_slots,
        compressed_lens,
        part,
        lse,
        scale,
        q.stride(0),
        q.stride(1),
        window_cache.stride(0),
        window_slots.stride(0),
        compressed_cache.stride(0),
        compressed_slots.stride(0),
        *part.stride()[:3],
        window_cache.shape[1],
        compressed_cache.shape[1],
        window_slots.shape[1],
        compressed_width,
        tokens,
        splits,
        HEADS=heads,
        SPLIT=splits > 1,
        BLOCK_H=block_h,
        BLOCK_N=_BLOCK_N,
        num_warps=_NUM_WARPS,
    )
    return _merge_attn_states_triton(part, lse, sink, out) if splits > 1 else out


def _sparse_mla_decode_triton(q, sink, scale, window_cache, window_slots, window_lens, compressed_cache=None,
                              compressed_slots=None, compressed_lens=None, out=None):  # fmt: skip
    """Split over the keys to fill the card."""
    keys = window_slots.shape[1] + (0 if compressed_slots is None else compressed_slots.shape[1])
    splits = split_count(max(1, len(q)), max(1, q.shape[1]), keys, arch.of_device(q.device).multiprocessors)
    return attend(q, sink, scale, window_cache, window_slots, window_lens, compressed_cache, compressed_slots,
                  compressed_lens, out, splits)  # fmt: skip


def _sparse_mla_prefill_triton(q, sink, scale, window_cache, window_slots, window_lens, compressed_cache=None,
                               compressed_slots=None, compressed_lens=None, out=None):  # fmt: skip
    """The tokens fill the card: one split."""
    return attend(q, sink, scale, window_cache, window_slots, window_lens, compressed_cache, compressed_slots,
                  compressed_lens, out, 1)  # fmt: skip


_POINTERS = {
    "q_ptr": "*bf16:16",
    "sink_ptr": "*fp32:16",
    "window_ptr": "*u8:16",
    "compressed_ptr": "*u8:16",
    **dict.fromkeys(_LISTS, "*i32"),
    "lse_ptr": "*fp32:16",
    "scale": "fp32",
}
_STRIDES = (
    *("q_tok", "q_head", "window_page", "compressed_page"),
    *("out_split", "out_tok", "out_head"),
)
COMPILES = tuple(
    Launch(
        _sparse_mla_decode_kernel,
        {
            **_POINTERS,
            "out_ptr": "*fp32:16" if split else "*bf16:16",
            **{f"stride_{name}": "i32:16" for name in _STRIDES},
            "window_rows": "i32:16",
            "compressed_rows": "i32:16",
            **dict.fromkeys(_RUN_TIME, "i32"),
        },
        {"HEADS": heads, "SPLIT": split, "BLOCK_H": block_h, "BLOCK_N": _BLOCK_N},
        num_warps=_NUM_WARPS,
        shared_reason="queries of 32 heads, 32 KiB, a tile of keys, 16 KiB, and its weights, 1 KiB" if block_h > 16 else "",
    )
    for heads in (8, 16, 32, 64)
    for block_h in sorted({_block_h(1, heads), _block_h(4096, heads)})
    for split in (False, True)
)
