# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels behind `compressor_pool`.

Two launches at ratio 2: every group is pooled before any row enters the ring, since a chunk of at least a ring's
length overwrites the row that its own first group reads.
"""

import torch

from ..launch import Launch, tl, triton
from ..triton_slots import request_of

_BLOCK_R = 64


@triton.jit(do_not_specialize=["capacity", "slot_count", "requests"])
def _compressor_pool_kernel(
    kv_score_ptr,
    positions_ptr,
    state_ptr,
    slots_ptr,
    query_start_ptr,
    norm_weight_ptr,
    prev_rows_ptr,
    prev_indices_ptr,
    out_ptr,
    eps,
    stride_kv_tok,
    stride_state_block,
    stride_state_row,
    stride_prev_row,
    stride_out_tok,
    capacity,
    slot_count,
    requests,
    RATIO: tl.constexpr,
    LINKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program owns one token and writes its row: the latent of the group that it closes, or zeros."""
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, 512)
    slot = tl.load(slots_ptr + token, mask=token < slot_count, other=-1)
    position = tl.load(positions_ptr + token, mask=token < slot_count, other=0)
    closes = (slot >= 0) & ((position + 1) % RATIO == 0)
    own_ptr = kv_score_ptr + token * stride_kv_tok
    if RATIO == 1:
        pooled = tl.load(own_ptr + offs_d, mask=closes, other=0.0)
    else:
        request = request_of(token, query_start_ptr, requests, 0, BLOCK_R)
        closes = closes & (request < requests)
        opens = tl.load(query_start_ptr + request, mask=closes, other=0) == token
        ring_ptr = state_ptr + slot // capacity * stride_state_block + (position - 1) % capacity * stride_state_row
        if LINKED:
            given = tl.load(prev_indices_ptr + request, mask=closes & opens, other=-1).to(tl.int64)
            ring_ptr = tl.where(given >= 0, prev_rows_ptr + given * stride_prev_row, ring_ptr)
        before_ptr = tl.where(opens, ring_ptr, own_ptr - stride_kv_tok)
        before = tl.load(before_ptr + offs_d, mask=closes, other=0.0)
        own = tl.load(own_ptr + offs_d, mask=closes, other=0.0)
        gate_before = tl.load(before_ptr + 512 + offs_d, mask=closes, other=0.0)
        gate_own = tl.load(own_ptr + 512 + offs_d, mask=closes, other=0.0)
        peak = tl.maximum(gate_before, gate_own)
        weight_before, weight_own = tl.exp(gate_before - peak), tl.exp(gate_own - peak)
        pooled = (before * weight_before + own * weight_own) / (weight_before + weight_own)
    scale = tl.rsqrt(tl.sum(pooled * pooled, 0) / 512 + eps)
    latent = tl.where(closes, pooled * scale * tl.load(norm_weight_ptr + offs_d).to(tl.float32), 0.0)
    tl.store(out_ptr + token * stride_out_tok + offs_d, latent.to(tl.bfloat16))


@triton.jit(do_not_specialize=["capacity", "requests"])
def _compressor_ring_kernel(
    kv_score_ptr,
    state_ptr,
    slots_ptr,
    query_start_ptr,
    stride_kv_tok,
    stride_state_block,
    stride_state_row,
    capacity,
    requests,
    BLOCK_R: tl.constexpr,
):
    """One program owns one token: its row enters the ring if no later token of the chunk will take its place."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    request = request_of(token, query_start_ptr, requests, 0, BLOCK_R)
    inside = (slot >= 0) & (request < requests)
    end = tl.load(query_start_ptr + 1 + request, mask=inside, other=0)
    offs = tl.arange(0, 1024)
    kept = inside & (token >= end - capacity)
    row = tl.load(kv_score_ptr + token * stride_kv_tok + offs, mask=kept, other=0.0)
    ring_ptr = state_ptr + slot // capacity * stride_state_block + slot % capacity * stride_state_row
    tl.store(ring_ptr + offs, row, mask=kept)


def _compressor_pool_triton(
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
):
    tokens, linked = len(kv_score), prev_rows is not None
    if out is None:
        out = torch.empty(tokens, 512, dtype=torch.bfloat16, device=kv_score.device)
    if not tokens:
        return out
    # At ratio 1 there is neither ring nor request: any pointer stands for them.
    ring = kv_score.unsqueeze(0) if state is None else state
    starts = slots if query_start is None else query_start
    requests = 0 if query_start is None else len(query_start) - 1
    _compressor_pool_kernel[(tokens,)](
        kv_score,
        positions,
        ring,
        slots,
        starts,
        norm_weight,
        prev_rows if linked else kv_score,
        prev_row_indices if linked else slots,
        out,
        eps,
        kv_score.stride(0),
        *ring.stride()[:2],
        prev_rows.stride(0) if linked else 0,
        out.stride(0),
        ring.shape[1],
        len(slots),
        requests,
        RATIO=ratio,
        LINKED=linked,
        BLOCK_R=_BLOCK_R,
    )
    if ratio == 2 and not linked and len(slots):
        _compressor_ring_kernel[(len(slots),)](
            kv_score,
            state,
            slots,
            query_start,
            kv_score.stride(0),
            *state.stride()[:2],
            state.shape[1],
            requests,
            BLOCK_R=_BLOCK_R,
        )
    return out


_TYPES = {
    "kv_score_ptr": "*fp32:16",
    "state_ptr": "*fp32:16",
    "slots_ptr": "*i64:16",
    "query_start_ptr": "*i32:16",
    "stride_kv_tok": "i32:16",
    "stride_state_block": "i32:16",
    "stride_state_row": "i32:16",
    "capacity": "i32",
    "requests": "i32",
}
COMPILES = (
    *(
        Launch(
            _compressor_pool_kernel,
            {
                **_TYPES,
                "positions_ptr": "*i64:16",
                "norm_weight_ptr": "*bf16:16",
                "prev_rows_ptr": "*fp32:16",
                "prev_indices_ptr": "*i32:16",
                "out_ptr": "*bf16:16",
                "eps": "fp32",
                "stride_prev_row": "i32:16",
                "stride_out_tok": "i32:16",
                "slot_count": "i32",
            },
            {"RATIO": ratio, "LINKED": linked, "BLOCK_R": _BLOCK_R},
        )
        for ratio, linked in ((1, False), (2, False), (2, True))
    ),
    Launch(_compressor_ring_kernel, _TYPES, {"BLOCK_R": _BLOCK_R}),
)
