# SPDX-License-Identifier: Apache-2.0
"""The attention family in plain PyTorch, float32 (model_spec section 5)."""

import torch

from ..kv_cache.reference import gather_dequant_slots_ref
from ..rope import rotate_tail

_TOKENS_PER_SLICE = 128
_WIDTH_MULTIPLE = 128


def inverse_rope_ref(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See `inverse_rope`."""
    return rotate_tail(o, positions, cos_sin, inverse=True).to(o.dtype)


def sparse_mla_decode_ref(
    q,
    sink,
    scale,
    window_cache,
    window_slots,
    window_lens,
    compressed_cache=None,
    compressed_slots=None,
    compressed_lens=None,
    out=None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """See `sparse_mla_decode`; with `dtype` float64, computed so and, without `out`, returned unrounded.

    Each token attends with a matrix product of its own over exactly its own keys, so neither its batch nor the
    padding of its lists changes a bit.
    """
    if out is None:
        out = q.new_empty(q.shape, dtype=dtype if dtype == torch.float64 else torch.bfloat16)
    sources = [(window_cache, window_slots, window_lens)]
    if compressed_cache is not None:
        sources.append((compressed_cache, compressed_slots, compressed_lens))
    sink = sink.to(dtype).unsqueeze(-1)
    for start in range(0, len(q), _TOKENS_PER_SLICE):
        part = slice(start, start + _TOKENS_PER_SLICE)
        rows, index = _slice_rows([(cache, slots[part], lens[part]) for cache, slots, lens in sources], dtype)
        for token, (query, own) in enumerate(zip(q[part].to(dtype), index), start):
            out[token] = _attend(query, rows.index_select(0, own), sink, scale)
    return out


sparse_mla_prefill_ref = sparse_mla_decode_ref


def sparse_mla_rows_ref(q, sink, scale, rows, indices, lens, out=None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """See `sparse_mla_rows`; `dtype` as in `sparse_mla_decode_ref`."""
    if out is None:
        out = q.new_empty(q.shape, dtype=dtype if dtype == torch.float64 else torch.bfloat16)
    sink = sink.to(dtype).unsqueeze(-1)
    for token, (query, listed, length) in enumerate(zip(q.to(dtype), indices, lens.tolist())):
        listed = listed[: max(length, 0)]
        out[token] = _attend(query, rows[listed[listed >= 0].long()].to(dtype), sink, scale)
    return out


def _slice_rows(sources, dtype) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The dequantised rows that a few tokens select, each once, and which of them each token selects.

    Returns:
        rows [U, 512], and of each token int64 [its entries that count].
    """
    rows, indices, found = [], [], 0
    for cache, slots, lens in sources:
        counts = (torch.arange(slots.shape[1], device=slots.device) < lens.unsqueeze(-1)) & (slots >= 0)
        distinct, inverse = slots[counts].long().unique(return_inverse=True)
        index = torch.full(slots.shape, -1, dtype=torch.int64, device=slots.device)
        index[counts] = inverse + found
        rows.append(gather_dequant_slots_ref(cache, distinct, dtype))
        indices.append(index)
        found += len(distinct)
    index = torch.cat(indices, 1)
    return torch.cat(rows), index[index >= 0].split((index >= 0).sum(-1).tolist())


def _attend(q, keys, sink, scale) -> torch.Tensor:
    """q [H, 512], keys [K, 512], sink [H, 1] -> [H, 512]; zeros where there is no key."""
    if not len(keys):
        return torch.zeros_like(q)
    logits = q @ keys.T * scale
    peak = torch.maximum(logits.amax(-1, keepdim=True), sink)
    weights = torch.exp(logits - peak)
    return weights @ keys / (weights.sum(-1, keepdim=True) + torch.exp(sink - peak))


def merge_attn_states_ref(partial, lse, sink, out=None) -> torch.Tensor:
    """See `merge_attn_states`."""
    every = torch.cat([lse, sink.expand(1, *lse.shape[1:])])
    peak = every.amax(0)
    weights = torch.where(every == -torch.inf, 0.0, torch.exp(every - peak))
    weights = weights / torch.where(peak == -torch.inf, 1.0, weights.sum(0))
    counted = torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, partial)
    merged = (counted * weights[:-1].unsqueeze(-1)).sum(0).to(torch.bfloat16)
    return merged if out is None else out.copy_(merged)


def _page_slots(block_table, request, rows, counts, page_rows) -> torch.Tensor:
    """Slots int32 of a request's rows [T, K]; -1 where an entry does not count."""
    rows = torch.where(counts, rows, 0).long()
    page = block_table[request.clamp_min(0).long().unsqueeze(-1), rows // page_rows]
    return torch.where(counts, page * page_rows + rows % page_rows, -1).int()


def topk_slots_ref(
    topk, request, block_table, positions, ratio: int, page_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `topk_slots`."""
    visible = ((positions + 1) // ratio).unsqueeze(-1)
    counts = (topk >= 0) & (topk < visible) & (request >= 0).unsqueeze(-1)
    column = torch.arange(1, topk.shape[1] + 1, dtype=torch.int32, device=topk.device)
    lens = torch.nn.functional.pad(torch.where(counts, column, 0), (1, 0)).amax(-1)
    return _page_slots(block_table, request, topk, counts, page_rows), lens


def window_slots_ref(
    positions, request, block_table, first, window: int, page_rows: int, ahead=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `window_slots`."""
    last = positions if ahead is None else positions + ahead
    begin = torch.maximum((last - window + 1).clamp_min(0), first[request.clamp_min(0).long()])
    lens = torch.where(request >= 0, (last - begin + 1).clamp_min(0), 0)
    column = torch.arange(window, device=positions.device)
    counts = column < lens.unsqueeze(-1)
    return _page_slots(block_table, request, begin.unsqueeze(-1) + column, counts, page_rows), lens.int()


def combined_width(topk: int, window: int) -> int:
    """Columns of a list of `topk` selected rows and `window` recent ones, padded as upstream's kernels take it."""
    return -(-(topk + window) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE


def combine_topk_swa_ref(
    topk_rows, query_start, seq_lens, gather_lens, window, ratio, topk, request_rows, compressed_rows, out=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `combine_topk_swa`."""
    tokens, device = len(topk_rows), topk_rows.device
    width = combined_width(topk, window)
    starts = query_start.long() - query_start[0]
    token = torch.arange(tokens, device=device)
    request = torch.bucketize(token, starts[1:], right=True)
    position = token - starts[1:][request] + seq_lens[request]
    selected = ((position + 1) // ratio).clamp(0, topk) if ratio else torch.zeros_like(position)
    gathered_from = (seq_lens - gather_lens)[request]
    begin = torch.maximum((position - window + 1).clamp_min(0), gathered_from)
    in_window = (position - begin + 1).clamp_min(0)

    selected, base = selected.unsqueeze(-1), (request * request_rows).unsqueeze(-1)
    column = torch.arange(width, device=device)
    row = torch.nn.functional.pad(topk_rows[:, :topk], (0, width - topk))
    chosen = torch.where((row >= 0) & (row < compressed_rows), row + base, -1)
    recent = base + compressed_rows + (begin - gathered_from).unsqueeze(-1) + column - selected
    lens = selected + in_window.unsqueeze(-1)
    indices = torch.where(column < selected, chosen, torch.where(column < lens, recent, -1)).int()
    lens = lens.flatten().int()
    return (indices, lens) if out is None else (out[0].copy_(indices), out[1].copy_(lens))
