# SPDX-License-Identifier: Apache-2.0
"""The latent caches in plain PyTorch, float32 (model_spec sections 5 and 12)."""

import torch

from ...cache_layout import HEAD_DIM, KV_GROUP, KV_GROUPS, KV_RECORD, NOPE_DIM, PageLayout
from ..quantization.reference import e4m3_decode_ref, quantize_groups, ue8m0_decode_ref
from ..rope import rotate_tail


def split_pages(cache: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a paged cache uint8 [B, P, row bytes]: values [B, P, data bytes], scales [B, P, scale bytes]."""
    pages, page_rows, _ = cache.shape

    def view(offset, row_bytes):
        return cache.as_strided(
            (pages, page_rows, row_bytes), (cache.stride(0), row_bytes, 1), cache.storage_offset() + offset
        )

    return view(0, layout.data_bytes), view(layout.scale_offset(0, page_rows), layout.scale_bytes)


def _write_rows(cache, slots, latent, positions, cos_sin) -> None:
    """Rotate, quantise and store rows; every slot >= 0."""
    codes, scales = quantize_groups(latent[:, :NOPE_DIM], KV_GROUP)
    tail = rotate_tail(latent, positions, cos_sin)[:, NOPE_DIM:].to(torch.bfloat16)
    values, scale_bytes = split_pages(cache, KV_RECORD)
    page, row = slots // cache.shape[1], slots % cache.shape[1]
    values[page, row] = torch.cat([codes, tail.contiguous().view(torch.uint8)], -1)
    scale_bytes[page, row] = torch.nn.functional.pad(scales, (0, KV_RECORD.scale_bytes - KV_GROUPS))


def window_insert_ref(kv, cache, slots, positions, cos_sin) -> None:
    """See `window_insert`."""
    kept = torch.nonzero(slots >= 0).flatten()
    _write_rows(cache, slots[kept], kv[kept], positions[kept], cos_sin)


def compressor_insert_ref(latent, cache, slots, positions, cos_sin, ratio: int) -> None:
    """See `compressor_insert`."""
    positions = positions[: len(slots)]
    kept = torch.nonzero((slots >= 0) & ((positions + 1) % ratio == 0)).flatten()
    _write_rows(cache, slots[kept], latent[kept], positions[kept] // ratio * ratio, cos_sin)


def gather_dequant_slots_ref(cache, slots, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See `gather_dequant_slots`; also in float64."""
    values, scale_bytes = split_pages(cache, KV_RECORD)
    kept = torch.nonzero(slots >= 0).flatten()
    page, row = slots[kept] // cache.shape[1], slots[kept] % cache.shape[1]
    data = values[page, row]
    scales = ue8m0_decode_ref(scale_bytes[page, row][:, :KV_GROUPS])
    nope = e4m3_decode_ref(data[:, :NOPE_DIM]).unflatten(-1, (KV_GROUPS, KV_GROUP)) * scales.unsqueeze(-1)
    tail = data[:, NOPE_DIM:].contiguous().view(torch.bfloat16)
    rows = torch.zeros(len(slots), HEAD_DIM, dtype=dtype, device=cache.device)
    rows[kept] = torch.cat([nope.flatten(-2), tail.float()], -1).to(dtype)
    return rows


def gather_dequant_ref(cache, seq_lens, gather_lens, block_table, out, offset: int) -> None:
    """See `gather_dequant`."""
    lengths = seq_lens if gather_lens is None else gather_lens
    for request, (end, length) in enumerate(zip(seq_lens.tolist(), lengths.tolist())):
        rows = torch.arange(end - length, end, device=cache.device)
        slots = block_table[request, rows // cache.shape[1]].long() * cache.shape[1] + rows % cache.shape[1]
        out[request, offset : offset + length] = gather_dequant_slots_ref(cache, slots, out.dtype)


def compressor_pool_ref(
    kv_score,
    positions,
    state,
    slots,
    query_start,
    norm_weight,
    eps,
    ratio,
    prev_rows=None,
    prev_row_indices=None,
    out=None,
) -> torch.Tensor:
    """See `compressor_pool`."""
    if out is None:
        out = kv_score.new_empty(len(kv_score), HEAD_DIM, dtype=torch.bfloat16)
    out.zero_()
    positions = positions[: len(slots)]
    closing = torch.nonzero((slots >= 0) & ((positions + 1) % ratio == 0)).flatten()
    if ratio == 1:
        pooled = kv_score[closing]
    else:
        request = torch.bucketize(torch.arange(len(slots), device=slots.device), query_start[1:], right=True)
        start = query_start[:-1].long()[request[closing]]
        before = kv_score[(closing - 1).clamp_min(0)]
        opens = torch.nonzero(closing == start).flatten()
        before[opens] = _rows_before(closing[opens], request, positions, state, slots, prev_rows, prev_row_indices)
        latent, score = torch.stack([before, kv_score[closing]]).split(HEAD_DIM, -1)
        pooled = (latent * score.softmax(0)).sum(0)
        if prev_rows is None:
            _save_ring(kv_score, state, slots, query_start, request)
    scale = torch.rsqrt(pooled.square().mean(-1, keepdim=True) + eps)
    out[closing] = (pooled * scale * norm_weight.float()).to(torch.bfloat16)
    return out


def _rows_before(tokens, request, positions, state, slots, prev_rows, prev_row_indices) -> torch.Tensor:
    """The row of the token before each chunk that opens at one of `tokens`."""
    capacity = state.shape[1]
    rows = state[slots[tokens] // capacity, (positions[tokens] - 1) % capacity]
    if prev_rows is not None:
        given = prev_row_indices[request[tokens]].long()
        rows = torch.where((given >= 0).unsqueeze(-1), prev_rows[given.clamp_min(0)], rows)
    return rows


def _save_ring(kv_score, state, slots, query_start, request) -> None:
    """Store the last rows of each chunk, as many as the ring holds, in the ring of its request."""
    capacity = state.shape[1]
    token = torch.nonzero((slots >= 0) & (request < len(query_start) - 1)).flatten()
    kept = token[token >= query_start[request[token] + 1] - capacity]
    state[slots[kept] // capacity, slots[kept] % capacity] = kv_score[kept]
