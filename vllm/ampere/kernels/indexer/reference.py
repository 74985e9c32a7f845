# SPDX-License-Identifier: Apache-2.0
"""The indexer family in plain PyTorch, float32 (model_spec section 5, indexer)."""

import torch

from ...cache_layout import INDEX_DIM, INDEX_KEY
from ...errors import ContractError
from ..kv_cache.reference import split_pages
from ..quantization.reference import quantize_groups, ue8m0_decode_ref
from ..rms_norm import rms_norm
from ..rope import rotate_tail
from ..row_tiles import pad_rows

# One product scores this many tokens against this many keys: a bounded workspace, and shapes that do not
# depend on the batch.
_TOKENS, _KEYS = 8, 256
_MINUS_INF = float("-inf")


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes of x [..., 128] and their float32 power-of-two scale [...]."""
    codes, scale = quantize_groups(x, INDEX_DIM)
    return codes.view(torch.float8_e4m3fn), ue8m0_decode_ref(scale.squeeze(-1))


def query_rope_quant_ref(q, positions, cos_sin, weights, softmax_scale, head_scale):
    """See `query_rope_quant`."""
    codes, scale = _quantize(rotate_tail(q, positions, cos_sin).to(q.dtype))
    return codes, weights.float() * scale * softmax_scale * head_scale


def key_norm_rope_store_ref(k, positions, cos_sin, norm_weight, eps, cache, slots, ratio):
    """See `key_norm_rope_store`."""
    positions = positions[: slots.shape[0]]
    kept = (slots >= 0) & ((positions + 1) % ratio == 0)
    slots, positions, k = slots[kept], positions[kept], k[: slots.shape[0]][kept]
    normed = rms_norm(k, norm_weight, eps).to(k.dtype)
    codes, scale = _quantize(rotate_tail(normed, positions // ratio * ratio, cos_sin).to(k.dtype))
    page, row = slots // cache.shape[1], slots % cache.shape[1]
    code_bytes, scale_bytes = split_pages(cache, INDEX_KEY)
    code_bytes[page, row] = codes.view(torch.uint8)
    scale_bytes[page, row] = scale.view(torch.uint8).view(-1, INDEX_KEY.scale_bytes)


def read_index_keys(cache: torch.Tensor, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` keys of the request with page table `table`: codes [count, 128], scales [count]."""
    key = torch.arange(count, device=cache.device)
    page, row = table.long()[key // cache.shape[1]], key % cache.shape[1]
    code_bytes, scale_bytes = split_pages(cache, INDEX_KEY)
    return code_bytes[page, row].view(torch.float8_e4m3fn), scale_bytes[page, row].view(torch.float32).flatten()


def _scores(q, weights, keys, key_scales):
    """key_scale_j * sum_h w_h relu(q_h . k_j): q [T, N, 128], keys [S, 128] -> float32 [T, S]."""
    tokens, count = q.shape[0], keys.shape[0]
    q, weights, codes = pad_rows(q.float(), _TOKENS), pad_rows(weights, _TOKENS), pad_rows(keys.float(), _KEYS)
    out = weights.new_empty(q.shape[0], codes.shape[0])
    for a in range(0, q.shape[0], _TOKENS):
        for b in range(0, codes.shape[0], _KEYS):
            dot = q[a : a + _TOKENS].flatten(0, 1) @ codes[b : b + _KEYS].t()
            heads = dot.relu_().unflatten(0, (_TOKENS, -1)) * weights[a : a + _TOKENS, :, None]
            out[a : a + _TOKENS, b : b + _KEYS] = heads.sum(1)
    return out[:tokens, :count] * key_scales


def mqa_logits_ref(q, weights, keys, key_scales, starts, ends, width):
    """See `mqa_logits`."""
    out = weights.new_full((q.shape[0], width), _MINUS_INF)
    lengths = ends - starts
    _check_width("mqa_logits", lengths, width)
    for start in starts[lengths > 0].unique().tolist():
        rows = torch.nonzero((starts == start) & (lengths > 0)).flatten()
        count = int(lengths[rows].max())
        part = slice(start, start + count)
        out[rows, :count] = _visible(_scores(q[rows], weights[rows], keys[part], key_scales[part]), lengths[rows])
    return out


def paged_mqa_logits_ref(q, weights, cache, block_table, request, visible, width, fill=True):
    """See `paged_mqa_logits`; fills in either case."""
    out = weights.new_full((q.shape[0], width), _MINUS_INF)
    _check_width("paged_mqa_logits", visible, width)
    for r in request[visible > 0].unique().tolist():
        rows = torch.nonzero((request == r) & (visible > 0)).flatten()
        count = int(visible[rows].max())
        keys, scales = read_index_keys(cache, block_table[r], count)
        out[rows, :count] = _visible(_scores(q[rows], weights[rows], keys, scales), visible[rows])
    return out


def candidate_mqa_logits_ref(q, weights, cache, block_table, request, visible, candidates, block_size):
    """See `candidate_mqa_logits`: the listed columns of `paged_mqa_logits_ref`, a few tokens at a time."""
    width = max([1, *visible.tolist()])
    column = torch.arange(candidates.shape[1] * block_size, device=q.device)
    out = weights.new_empty(q.shape[0], len(column))
    for a in range(0, q.shape[0], _TOKENS):
        part = slice(a, a + _TOKENS)
        scores = paged_mqa_logits_ref(q[part], weights[part], cache, block_table, request[part], visible[part], width)
        key = candidates[part].long()[:, column // block_size] * block_size + column % block_size
        seen = (key >= 0) & (key < width)
        out[part] = scores.gather(1, torch.where(seen, key, 0)).masked_fill(~seen, _MINUS_INF)
    return out


def _check_width(op, lengths, width):
    if lengths.numel() and int(lengths.max()) > width:
        raise ContractError(f"{op}: a row sees {int(lengths.max())} keys, width is {width}")


def _visible(scores, lengths):
    columns = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(columns >= lengths[:, None], _MINUS_INF)


def _first_largest(scores, k):
    """Columns of the k largest entries above -inf, ascending, -1 behind them; of equals the first ones win."""
    rows, width = scores.shape
    out = torch.full((rows, k + 1), -1, dtype=torch.int32, device=scores.device)
    if width and k:
        kth = scores.topk(min(k, width), -1).values[:, -1:]
        above, equal = scores > kth, scores == kth
        keep = above | (equal & (equal.cumsum(-1) <= k - above.sum(-1, keepdim=True)))
        keep &= scores > _MINUS_INF
        place = torch.where(keep, keep.cumsum(-1) - 1, k)
        out.scatter_(1, place, torch.arange(width, dtype=torch.int32, device=scores.device).expand(rows, -1))
    return out[:, :k].contiguous()


def candidate_blocks_ref(scores, visible, blocks, block_size):
    """See `candidate_blocks`."""
    finite = torch.nan_to_num(scores, nan=_MINUS_INF, posinf=torch.finfo(scores.dtype).max, neginf=_MINUS_INF)
    rows, width = scores.shape
    count = -(-width // block_size)
    padded = torch.nn.functional.pad(_visible(finite, visible), (0, -width % block_size), value=_MINUS_INF)
    best = padded.view(rows, count, block_size).amax(-1)
    number = torch.arange(count, device=scores.device)
    newest = ((visible.long() - 1) // block_size)[:, None]
    return _first_largest(best.masked_fill(number == newest, float("inf")), blocks)


def mask_to_candidates_ref(scores, candidates, block_size):
    """See `mask_to_candidates`."""
    rows, width = scores.shape
    count = -(-width // block_size)
    listed = torch.zeros(rows, count + 1, dtype=torch.bool, device=scores.device)
    listed.scatter_(1, torch.where((candidates >= 0) & (candidates < count), candidates, count).long(), True)
    return scores.masked_fill(~listed[:, :count].repeat_interleave(block_size, 1)[:, :width], _MINUS_INF)


def select_topk_ref(scores, k, visible=None, candidates=None, block_size=1):
    """See `select_topk`."""
    scores = scores.masked_fill(scores.isnan(), _MINUS_INF)
    if visible is not None:
        blocks = (visible.clamp_min(0) + block_size - 1) // block_size
        scores = _visible(scores, visible if candidates is None else blocks * block_size)
    chosen = _first_largest(scores, k)
    if candidates is None or not candidates.numel():
        return chosen
    block = candidates.gather(1, chosen.clamp_min(0).long() // block_size)
    return torch.where(chosen < 0, chosen, block * block_size + chosen % block_size)
