# SPDX-License-Identifier: Apache-2.0
"""The engram family in plain PyTorch (model_spec section 8)."""

import torch

from ...cache_layout import ENGRAM_GROUP
from ..quantization.reference import ue8m0_decode_ref
from ..row_tiles import pad_rows

DEAD = -1


def engram_lookup_ref(table, scales, rows, first_row, end_row, out=None):
    """See `engram_lookup`."""
    own = (rows >= first_row) & (rows < end_row)
    local = (rows - first_row)[own]
    codes = table[local].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, ENGRAM_GROUP))
    values = codes * ue8m0_decode_ref(scales[local]).unsqueeze(-1)
    if out is None:
        out = torch.empty(*rows.shape, table.shape[1], dtype=torch.bfloat16, device=table.device)
    out.zero_()
    out[own] = values.flatten(-2).to(out.dtype)
    return out


def engram_hash_ref(tokens, positions, query_start, lookback, primes, multipliers, pad_id):
    """See `engram_hash`."""
    index = torch.arange(tokens.shape[0], device=tokens.device)
    request = torch.searchsorted(query_start[1:].contiguous(), index.to(query_start.dtype), right=True)
    request = request.clamp_max(lookback.shape[0] - 1)
    start = query_start[:-1][request]
    offsets = (primes.flatten().cumsum(0) - primes.flatten()).view_as(primes)
    blocked = torch.zeros_like(tokens, dtype=torch.bool)
    rolling, columns = torch.zeros_like(tokens), []
    for shift, multiplier in enumerate(multipliers):
        before = (start + shift - index - 1).clamp(0, lookback.shape[1] - 1).long()
        source = torch.where(index - shift >= start, tokens[(index - shift).clamp_min(0)], lookback[request, before])
        blocked |= (positions < shift) | (source == DEAD)
        rolling = rolling ^ (torch.where(blocked, pad_id, source) * multiplier)
        if shift:
            columns.append(rolling[:, None] % primes[shift - 1] + offsets[shift - 1])
    return torch.cat(columns, 1)


def engram_gate_ref(streams, kv, q_weight, k_weight, live, eps, clamp):
    """See `engram_gate`."""
    tokens, count, dim = streams.shape
    x, rows = streams.float(), kv.float()
    key, value = rows[:, : count * dim].unflatten(-1, (count, dim)), rows[:, count * dim :]
    dot = (x * q_weight.float() * k_weight.float() * key).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps) * dim**-0.5
    root = dot.abs().clamp_min(clamp).sqrt()
    gate = torch.sigmoid(pad_rows(torch.where(dot < 0, -root, root)))[:tokens]
    if live is not None:
        gate = torch.where(live[:, None], gate, 0.0)
    return (x + gate.unsqueeze(-1) * value[:, None]).to(streams.dtype)
