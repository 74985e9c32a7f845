# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel behind `sparse_mla_decode` and `sparse_mla_prefill`.

One program owns one token, a block of its heads and one split of its keys. The keys of a token are two lists laid end
to end in tiles, the window's and then the compressed; a split takes an equal share of the tiles that the token's
lengths call for, so short lists cost short loops. A tile's rows are decoded once for all heads of the block, and serve
both products. With one split the program counts the sink and writes the result; otherwise it writes its normalised
part and the logarithm of its denominator for `merge_attn_states`.

The 512 dimensions are 256 + 128 + 64 and the 64 rotary ones, powers of two all, so no column needs a mask. The matrix
unit takes 16 rows at least: 8 heads are padded with masked ones.
"""

import torch

from ... import arch
from ..kv_cache.triton_record import load_nope, load_rope, record_pointers
from ..launch import Launch, tl, triton
from .merge_attn_states import _merge_attn_states_triton

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-1e30)
_BLOCK_N = 32
_NUM_WARPS = 4
_NUM_STAGES = 2

_RUN_TIME = ["stride_window_tok", "stride_compressed_tok", "window_width", "compressed_width", "tokens", "splits"]
_LISTS = ["window_slots_ptr", "window_lens_ptr", "compressed_slots_ptr", "compressed_lens_ptr"]


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
    COMPRESSED: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """`out_ptr` is the bfloat16 result, or with SPLIT the float32 parts [splits, tokens, HEADS, 512]."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    offs_h = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    is_head = (offs_h < HEADS)[:, None]

    window_len = tl.minimum(tl.load(window_lens_ptr + token), window_width)
    window_tiles = (tl.maximum(window_len, 0) + BLOCK_N - 1) // BLOCK_N
    tiles = window_tiles
    if COMPRESSED:
        compressed_len = tl.minimum(tl.load(compressed_lens_ptr + token), compressed_width)
        tiles += (tl.maximum(compressed_len, 0) + BLOCK_N - 1) // BLOCK_N
    share = (tiles + splits - 1) // splits
    first = split * share
    last = tl.minimum(first + share, tiles)

    offs_256, offs_128, offs_64 = tl.arange(0, 256)[None, :], tl.arange(0, 128)[None, :], tl.arange(0, 64)[None, :]
    q_row = q_ptr + token * stride_q_tok + offs_h.to(tl.int64)[:, None] * stride_q_head
    q_a = tl.load(q_row + offs_256, mask=is_head, other=0.0)
    q_b = tl.load(q_row + 256 + offs_128, mask=is_head, other=0.0)
    q_c = tl.load(q_row + 384 + offs_64, mask=is_head, other=0.0)
    q_rope = tl.load(q_row + 448 + offs_64, mask=is_head, other=0.0)
    acc_a = tl.zeros([BLOCK_H, 256], tl.float32)
    acc_b = tl.zeros([BLOCK_H, 128], tl.float32)
    acc_c = tl.zeros([BLOCK_H, 64], tl.float32)
    acc_rope = tl.zeros([BLOCK_H, 64], tl.float32)
    peak = tl.full([BLOCK_H], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    log2_scale = scale * _LOG2_E

    for tile in range(first, last):
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        cache_ptr, slots_ptr, length = window_ptr, window_slots_ptr + token * stride_window_tok, window_len
        stride_page, page_rows = stride_window_page, window_rows
        if COMPRESSED:
            in_window = tile < window_tiles
            column -= tl.where(in_window, 0, window_tiles * BLOCK_N)
            cache_ptr = tl.where(in_window, cache_ptr, compressed_ptr)
            slots_ptr = tl.where(in_window, slots_ptr, compressed_slots_ptr + token * stride_compressed_tok)
            length = tl.where(in_window, length, compressed_len)
            stride_page = tl.where(in_window, stride_page, stride_compressed_page)
            page_rows = tl.where(in_window, page_rows, compressed_rows)
        slots = tl.load(slots_ptr + column, mask=column < length, other=-1)
        counts = slots >= 0
        data_ptr, scale_ptr = record_pointers(cache_ptr, tl.maximum(slots, 0), stride_page, page_rows)
        k_a = load_nope(data_ptr, scale_ptr, counts, 0, 256, BLOCK_N).to(tl.bfloat16)
        k_b = load_nope(data_ptr, scale_ptr, counts, 256, 128, BLOCK_N).to(tl.bfloat16)
        k_c = load_nope(data_ptr, scale_ptr, counts, 384, 64, BLOCK_N).to(tl.bfloat16)
        k_rope = load_rope(data_ptr, counts)

        logits = tl.dot(q_a, tl.trans(k_a))
        logits = tl.dot(q_b, tl.trans(k_b), logits)
        logits = tl.dot(q_c, tl.trans(k_c), logits)
        logits = tl.dot(q_rope, tl.trans(k_rope), logits)
        logits = tl.where(counts[None, :], logits * log2_scale, _LOWEST)
        higher = tl.maximum(peak, tl.max(logits, 1))
        # A tile of holes only would otherwise weigh e^0 each.
        weights = tl.where(counts[None, :], tl.exp2(logits - higher[:, None]), 0.0)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
        weights = weights.to(tl.bfloat16)
        acc_a = tl.dot(weights, k_a, acc_a * shrink[:, None])
        acc_b = tl.dot(weights, k_b, acc_b * shrink[:, None])
        acc_c = tl.dot(weights, k_c, acc_c * shrink[:, None])
        acc_rope = tl.dot(weights, k_rope, acc_rope * shrink[:, None])

    # Compared with zero, not by order: a NaN among the keys has to reach the result.
    empty = total == 0.0
    out_row = out_ptr + token * stride_out_tok + offs_h.to(tl.int64)[:, None] * stride_out_head
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
    tl.store(out_row + offs_256, (acc_a * factor[:, None]).to(dtype), mask=is_head)
    tl.store(out_row + 256 + offs_128, (acc_b * factor[:, None]).to(dtype), mask=is_head)
    tl.store(out_row + 384 + offs_64, (acc_c * factor[:, None]).to(dtype), mask=is_head)
    tl.store(out_row + 448 + offs_64, (acc_rope * factor[:, None]).to(dtype), mask=is_head)


def _block_h(heads: int) -> int:
    """Heads of one program."""
    return 16 if heads <= 16 else 32


def _programs_per_multiprocessor(heads: int) -> int:
    return 4 if heads <= 16 else 2


def split_count(tokens: int, heads: int, keys: int, multiprocessors: int) -> int:
    """How many parts each token's keys are split into: enough programs to fill the card, and a tile of keys for each.

    Args:
        tokens, heads: sizes of the call, both at least 1.
        keys: entries of both lists, whether they count or not.
        multiprocessors: of the architecture.
    """
    programs = tokens * -(-heads // _block_h(heads))
    return max(1, min(-(-keys // _BLOCK_N), _programs_per_multiprocessor(heads) * multiprocessors // programs))


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
    compressed = compressed_cache is not None
    if not compressed:
        compressed_cache, compressed_slots, compressed_lens = window_cache, window_slots, window_lens
    part, lse = out.unsqueeze(0), sink
    if splits > 1:
        part = torch.empty(splits, tokens, heads, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    block_h = _block_h(heads)
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
        compressed_slots.shape[1],
        tokens,
        splits,
        HEADS=heads,
        COMPRESSED=compressed,
        SPLIT=splits > 1,
        BLOCK_H=block_h,
        BLOCK_N=_BLOCK_N,
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
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
# 16 and 32 heads differ from these by their masks only.
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
        {"HEADS": heads, "COMPRESSED": compressed, "SPLIT": split, "BLOCK_H": _block_h(heads), "BLOCK_N": _BLOCK_N},
        num_warps=_NUM_WARPS,
        num_stages=_NUM_STAGES,
        # Four warps spill and eight do not, and yet take 1.4 to 1.6 times as long at 8 and 32 tokens.
        spill_bytes=280 if heads <= 16 else 650,
    )
    for heads in (8, 64)
    for compressed in (False, True)
    for split in (False, True)
)
