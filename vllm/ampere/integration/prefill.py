# SPDX-License-Identifier: Apache-2.0
"""Attention of a step's prefill rows over rows gathered to bfloat16.

A row that a long step selects is selected by hundreds of its tokens, so it is decoded once, into vLLM's shared workspace,
and attention reads numbers. The workspace holds the longest request; more requests than fit go in chunks, by
upstream's own plan. A captured step cannot follow that plan, which is the host's: it reads the pages directly.
"""

import torch
from vllm.v1.worker.workspace import current_workspace_manager

from ..cache_layout import HEAD_DIM
from ..kernels.attention.combine_topk_swa import combine_topk_swa
from ..kernels.attention.reference import combined_width
from ..kernels.attention.sparse_mla_rows import sparse_mla_rows
from ..kernels.kv_cache.gather_dequant import gather_dequant


def gathers(q: torch.Tensor) -> bool:
    """Whether the rows of this step are gathered: on a card, outside a capture."""
    return q.is_cuda and not torch.cuda.is_current_stream_capturing()


def _selected(layer) -> int:
    """Columns of the layer's index lists."""
    return layer.topk_indices_buffer.shape[1] if layer.compress_ratio else 0


def _workspace(layer, requests: int, request_rows: int):
    """bfloat16 [requests, request_rows, 512] of latents, and lists int32 [tokens of a step, width] with their lengths."""
    tokens = layer.max_num_batched_tokens
    width = combined_width(_selected(layer), layer.window_size)
    return current_workspace_manager().get_simultaneous(
        ((requests, request_rows, HEAD_DIM), torch.bfloat16), ((tokens, width), torch.int32), ((tokens,), torch.int32)
    )


def reserve(layer) -> None:
    """Take, before memory is profiled, what the longest request of an `AmpereDeepseekV4Attention` calls for."""
    compressed = -(-layer.max_model_len // layer.compress_ratio) if layer.compress_ratio else 0
    _workspace(layer, 1, compressed + layer.window_size + layer.max_num_batched_tokens)


def attend(layer, window, compressed, q: torch.Tensor, output: torch.Tensor) -> None:
    """Sparse attention of the prefill rows of a step.

    Args:
        layer: an `AmpereDeepseekV4Attention`.
        window: metadata of its window cache.
        compressed: metadata of its compressed cache; not read for a window-only layer.
        q, output: bfloat16 [prefill rows, H, 512]; `output` is written.
    """
    ratio, decodes = layer.compress_ratio, window.num_decodes
    starts, starts_cpu = window.query_start_loc[decodes:], window.query_start_loc_cpu[decodes:]
    listed = layer.topk_indices_buffer[window.num_decode_tokens :]
    for first, last, compressed_rows, request_rows in window.get_prefill_chunk_plan(ratio, 1, has_compressed=ratio > 0):
        requests, table = slice(first, last), slice(decodes + first, decodes + last)
        begin, end = (int(starts_cpu[edge] - starts_cpu[0]) for edge in (first, last))
        rows, indices, lens = _workspace(layer, last - first, request_rows)
        seq_lens, gather_lens = window.prefill_seq_lens[requests], window.prefill_gather_lens[requests]
        if ratio:
            gather_dequant(layer._compressed_kv_cache(), seq_lens // ratio, None, compressed.block_table[table], rows, 0)
        gather_dequant(
            layer.swa_cache_layer.kv_cache, seq_lens, gather_lens, window.block_table[table], rows, compressed_rows
        )
        lists = indices[: end - begin], lens[: end - begin]
        combine_topk_swa(
            listed[begin:end], starts[first : last + 1], seq_lens, gather_lens, layer.window_size, ratio,
            _selected(layer), request_rows, compressed_rows, out=lists,
        )  # fmt: skip
        sparse_mla_rows(q[begin:end], layer.attn_sink, layer.scale, rows.flatten(0, 1), *lists, out=output[begin:end])
