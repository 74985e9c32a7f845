# SPDX-License-Identifier: Apache-2.0
"""The attention layer of DeepSeek-V4.1 on our ops.

Decode reads the 584-byte pages directly. Upstream's metadata already holds the window's slots of every row; the
slots of the selected compressed rows are computed here from the index list that the row's index source published.
Prefill gathers its rows first (`prefill`), and reads the pages where it cannot.
"""

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4FlashMLABackend,
    DeepseekV41SparseSWAMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend

from ..cache_layout import rotary_rows
from ..kernels.attention.inverse_rope import inverse_rope
from ..kernels.attention.sparse_mla_decode import sparse_mla_decode
from ..kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from ..kernels.attention.topk_slots import topk_slots
from . import prefill, rotary, trace, warmup
from .compressor import AmpereDeepseekCompressor
from .indexer import AmpereDeepseekV4Indexer


class AmpereSparseSWAMetadataBuilder(DeepseekV41SparseSWAMetadataBuilder):
    """Window metadata without FlashMLA's tile plans; rows of a step may have any query length."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, None]:
        return dict.fromkeys(super().build_tile_scheduler(0))


class AmpereSparseSWABackend(DeepseekSparseSWABackend):
    @staticmethod
    def get_builder_cls() -> type[AmpereSparseSWAMetadataBuilder]:
        return AmpereSparseSWAMetadataBuilder


class AmpereDeepseekV4Attention(DeepseekV4Attention):
    """Attention layer whose kernels are ours and whose projections, norms and KV insert are upstream's."""

    backend_cls = DeepseekV4FlashMLABackend
    swa_backend_cls = AmpereSparseSWABackend
    compressor_cls = AmpereDeepseekCompressor

    def __init__(self, vllm_config, *args, **kwargs) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        rows = rotary_rows(vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_batched_tokens)
        self.rotary_emb = self.indexer_rotary_emb = rotary.shortened(self.rotary_emb, rows)
        self._replay_rows = 0
        warmup.register(self, vllm_config)

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _indexer_cls(self, k_cache):
        return AmpereDeepseekV4Indexer

    def forward_kv(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> None:
        super().forward_kv(positions, hidden_states)
        self._replay_rows = positions.shape[0]

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Sparse attention of this step's rows, decode rows first, into `output` [T, H, 512]."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # profile run: no cache is bound
            if q.is_cuda:
                prefill.reserve(self)
            output.zero_()
            return
        window = metadata[self.swa_cache_layer.prefix]
        decodes = window.num_decode_tokens
        rows = decodes + window.num_prefill_tokens
        if self._replay_rows:
            trace.emit("replay_trim", layer=self.layer_id, rows=self._replay_rows, kept=rows)
            self._replay_rows = 0
        output[rows:].zero_()
        if decodes < rows and prefill.gathers(q):
            compressed = metadata.get(self.compressed_cache_prefix)
            prefill.attend(self, window, compressed, q[decodes:rows], output[decodes:rows])
            rows = decodes
        if not rows:
            return
        cache, slots, lens = self._selected(metadata, window, positions, rows)
        for op, start, end, window_slots, window_lens in (
            (sparse_mla_decode, 0, decodes, window.decode_swa_indices, window.decode_swa_lens),
            (sparse_mla_prefill, decodes, rows, window.prefill_swa_indices, window.prefill_swa_lens),
        ):
            if start < end:
                op(
                    q[start:end],
                    self.attn_sink,
                    self.scale,
                    self.swa_cache_layer.kv_cache,
                    window_slots.flatten(1),
                    window_lens,
                    cache,
                    None if slots is None else slots[start:end],
                    None if lens is None else lens[start:end],
                    out=output[start:end],
                )

    def _selected(self, metadata, window, positions, rows):
        """Compressed cache of this layer's source, with the slots and counts each row selected from it."""
        if self.compress_ratio == 0:
            return None, None, None
        cache = self._compressed_kv_cache()
        request = torch.where(window.is_valid_token[:rows], window.token_to_req_indices[:rows], -1)
        slots, lens = topk_slots(
            self.topk_indices_buffer[:rows],
            request,
            metadata[self.compressed_cache_prefix].block_table,
            positions[:rows],
            self.compress_ratio,
            cache.shape[1],
        )
        return cache, slots, lens

    def _o_proj(self, attn_out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        o = inverse_rope(attn_out, positions, self.rotary_emb.cos_sin_cache)
        o = o.view(o.shape[0], self.n_local_groups, -1)
        weight = self.wo_a.weight.view(self.n_local_groups, self.o_lora_rank, -1)
        z = torch.bmm(o.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        return self._wo_b_proj(z.flatten(1))
