# SPDX-License-Identifier: Apache-2.0
"""The indexer on our ops: keys, queries, scores, candidate blocks and the selection.

Every row is described by its request and by how many compressed rows it may see. Both come from the
step's device metadata, the same for prefill and decode. A layer that selects inside another's candidate
blocks scores their rows only.
"""

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer

from ..cache_layout import SCORE_BUDGET_BYTES
from ..kernels.indexer.candidate_mqa_logits import candidate_mqa_logits
from ..kernels.indexer.candidate_topk import candidate_blocks, select_topk
from ..kernels.indexer.key_norm_rope_store import key_norm_rope_store
from ..kernels.indexer.paged_mqa_logits import paged_mqa_logits
from ..kernels.indexer.query_rope_quant import query_rope_quant


class AmpereSparseAttnIndexer(SparseAttnIndexer):
    """Scores index keys in their pages and publishes the selected rows."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._forward_method = self._select

    def _select(self, hidden_states, q, k, weights):
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # profile run
            return self.topk_indices_buffer
        index = metadata[self.k_cache.prefix]
        # The compressed cache of the same source sits in the same cache group.
        source = metadata[self.k_cache.prefix.removesuffix(".indexer.k_cache")]
        rows = index.num_decode_tokens + index.num_prefill_tokens
        request = source.req_id_per_token[:rows]
        token = torch.arange(rows, device=request.device)
        position = index.seq_lens[request] - source.query_start_loc[1:][request] + token
        width = max(1, index.max_seq_len // self.compress_ratio)
        visible = ((position + 1) // self.compress_ratio).clamp(0, width).to(torch.int32)
        listed, columns = None, width
        if self.candidate_blocks is not None and not self.candidate_write:
            # No list names more blocks than the longest context has.
            listed = self.candidate_blocks[:rows, : -(-width // self.candidate_block_size)]
            columns = listed.shape[1] * self.candidate_block_size
        step = max(1, SCORE_BUDGET_BYTES // (4 * columns))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            tokens = q[part], weights[part], self.k_cache.kv_cache, source.block_table, request[part], visible[part]
            if listed is None:
                self._select_rows(part, tokens, width)
            else:
                self._select_listed_rows(part, tokens, listed[part])
        return self.topk_indices_buffer

    def _select_rows(self, part, tokens, width) -> None:
        visible = tokens[-1]
        scores = paged_mqa_logits(*tokens, width, fill=False)
        if self.candidate_blocks is not None:
            self.candidate_blocks[part] = candidate_blocks(
                scores, visible, self.candidate_blocks.shape[1], self.candidate_block_size
            )
        self.topk_indices_buffer[part] = select_topk(scores, self.topk_indices_buffer.shape[1], visible)

    def _select_listed_rows(self, part, tokens, listed) -> None:
        size = self.candidate_block_size
        scores = candidate_mqa_logits(*tokens, listed, size)
        self.topk_indices_buffer[part] = select_topk(scores, self.topk_indices_buffer.shape[1], tokens[-1], listed, size)


def store_keys(indexer, latents, positions, rotary_emb) -> None:
    """Write the index keys of this step's latents, bfloat16 [T, 512], into the key cache of an `indexer` with `wk`."""
    keys, _ = indexer.wk(latents)
    key_norm_rope_store(
        keys,
        positions,
        rotary_emb.cos_sin_cache,
        indexer.k_norm.weight,
        indexer.k_norm.variance_epsilon,
        indexer.k_cache.kv_cache,
        get_forward_context().attn_metadata[indexer.k_cache.prefix].slot_mapping,
        indexer.compress_ratio,
    )


class AmpereDeepseekV4Indexer(DeepseekV4Indexer):
    """Indexer whose key store, query quantiser and selection are ours."""

    attn_cls = AmpereSparseAttnIndexer

    def _produce_k(self, latent, positions, rotary_emb) -> None:
        if isinstance(get_forward_context().attn_metadata, dict) and latent is not None:  # else a profile run
            store_keys(self, latent, positions, rotary_emb)

    def forward_q(self, qr, qr_scale, indexer_weights, positions, rotary_emb):
        q = self._wq_b_proj(qr, qr_scale).view(-1, self.n_head, self.head_dim)
        codes, weights = query_rope_quant(
            q, positions, rotary_emb.cos_sin_cache, indexer_weights, self.softmax_scale, self.n_head**-0.5
        )
        return codes, None, weights
