# SPDX-License-Identifier: Apache-2.0
"""The compressor, writing its records with our op."""

from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.compressor import DeepseekCompressor

from ..kernels.kv_cache.compressor_insert import compressor_insert


class AmpereDeepseekCompressor(DeepseekCompressor):
    """Pooling is upstream's; the insert into the compressed cache is ours."""

    def insert_cache(self, latent, positions, rotary_emb) -> None:
        if latent is None:  # profile run
            return
        slots = get_forward_context().attn_metadata[self.k_cache_prefix].slot_mapping
        cache = self._static_forward_context[self.k_cache_prefix].kv_cache
        compressor_insert(latent, cache, slots, positions, rotary_emb.cos_sin_cache, self.compress_ratio)
