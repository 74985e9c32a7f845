# SPDX-License-Identifier: Apache-2.0
"""PyTorch in place of Triton kernels that the interpreter runs wrongly or far too slowly.

The interpreter truncates when it rounds to bfloat16, so every kernel that stores bfloat16 is here; the
window index kernel takes a minute of interpretation for a prompt of 700 tokens. What the runner launches at
every step is in `runner_kernels`; its other integer kernels run interpreted, with right results.
"""

import ctypes

import torch

from ...kernels.attention.window_slots import window_slots
from ...kernels.engram.engram_gate import engram_gate
from ...kernels.engram.engram_hash import DEAD, engram_hash
from ...kernels.kv_cache.compressor_pool import compressor_pool
from ...kernels.mhc.mhc_pre import mhc_pre
from ...kernels.rms_norm import rms_norm
from .. import mhc


def q_kv_rmsnorm(q, kv, q_weight, kv_weight, eps):
    """RMS norms of the query latent and of the key/value latent."""
    return rms_norm(q, q_weight, eps).to(q.dtype), rms_norm(kv, kv_weight, eps).to(kv.dtype)


def pre(
    residual, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_alpha, iters,
    pre_mix=None, x=None, norm_weight=None, norm_eps=1e-6,
):  # fmt: skip
    """`mhc_pre` under upstream's argument order."""
    return mhc_pre(
        residual, fn, scale, base, pre_mix, norm_weight,
        rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_alpha=post_alpha,
        sinkhorn_iters=iters, norm_eps=norm_eps, x=x,
    )  # fmt: skip


def post_pre(*arguments, stream=None, reduce_results=False, **named):
    """`mhc_post_pre` under upstream's argument order; the overlap and fused-reduce variants need a GPU."""
    if stream is not None or reduce_results:
        raise NotImplementedError("overlapped hyper-connections need a GPU")
    return mhc.post_pre(*arguments, **named)


def save_compress_norm(
    kv_score, positions, state, slots, query_start, request, weight, eps, ratio, out,
    prev_rows=None, prev_row_indices=None,
):  # fmt: skip
    """`compressor_pool` under upstream's argument order."""
    compressor_pool(
        kv_score, positions, state, slots, query_start, weight, eps, ratio, prev_rows, prev_row_indices, out
    )


def fill_short_context(grid, topk, positions, TOP_K, COMPRESS_RATIO, **unused):
    """Select every visible compressed row: 0 .. (position + 1) // ratio - 1, then -1."""
    row = torch.arange(TOP_K, dtype=torch.int32)
    visible = ((positions[: grid[0]] + 1) // COMPRESS_RATIO).unsqueeze(1)
    topk[: grid[0]] = torch.where(row < visible, row, -1)


def gate_and_inject(
    grid, hidden, kv, q_weight, k_weight, mask, out, kv_rows, *strides, DIM, HC_MULT, HAS_MASK, **unused,
):  # fmt: skip
    """Engram's value, gated and added to every stream."""
    eps, clamp = strides[-2:]
    rows = grid[0] // HC_MULT
    keep = mask[:rows] if HAS_MASK else None
    out.copy_(engram_gate(hidden, kv[:rows], q_weight, k_weight, keep, eps=eps, clamp=clamp))


def hash_ids(
    grid, input_ids, token_map, dead_mask, positions, block_table, query_start, multipliers, primes, offsets, cache,
    lookback, lookback_dead, out, tokens, slots, pad_id, **unused,
):  # fmt: skip
    """`engram_hash` of every layer, after the map of token ids; a look-back that nobody knows counts as padding."""
    if cache is not None:
        raise NotImplementedError("a cache of mapped tokens needs a GPU")
    requests = len(query_start) - 1
    mapped = torch.where(dead_mask, DEAD, token_map[input_ids.long()]).long()
    before, dead = lookback[:requests], lookback_dead[:requests]
    before = torch.where(before < 0, pad_id, torch.where(dead, DEAD, token_map[before.clamp_min(0).long()])).long()
    for layer, own in enumerate(zip(primes, multipliers)):
        out[:, layer] = engram_hash(mapped, positions[:tokens].long(), query_start, before, *own, pad_id)


class WindowIndices:
    """Slots of the sliding window, in the place of upstream's launcher object."""

    def __init__(self, upstream):
        self.register_warmup = upstream.register_warmup

    def __call__(
        self, indices, lens, window, width, left, right, query_start, seq_lens, requests, valid, block_table,
        page_rows, replay_start, *, num_tokens, token_offset, has_image=False,
    ):  # fmt: skip
        if has_image:
            raise NotImplementedError("DeepSeek-V4.1 has no bidirectional image window")
        token = torch.arange(token_offset, token_offset + num_tokens)
        request = torch.where(valid[token], requests[token], -1)
        position = (seq_lens[request] - query_start[1:][request] + token).long()
        first = replay_start[: block_table.shape[0]]
        slots, counts = window_slots(position, request, block_table, first, window, page_rows)
        flat = indices.view(indices.shape[0], -1)
        flat[:num_tokens] = -1
        flat[:num_tokens, : slots.shape[1]] = slots
        lens[:num_tokens] = counts


def zero_blocks(zeroer, block_ids) -> None:
    """Zero newly allocated cache blocks: one memset a segment."""
    if zeroer._meta is None or not block_ids:
        return
    segments = list(zip(*(column.tolist() for column in zeroer._meta[:3])))
    for block in block_ids:
        for address, stride, size in segments:
            ctypes.memset(address + 4 * block * stride, 0, 4 * size)
