# SPDX-License-Identifier: Apache-2.0
"""The compressor, writing its records with our op."""

from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.compressor import DeepseekCompressor

from ..kernels.kv_cache.compressor_insert import compressor_insert


def insert_latents(source, latents, positions, rotary_emb, ratio: int) -> None:
    """Write this step's latents, bfloat16 [T, 512], into the compressed cache of `source`, a layer that owns one."""
    slots = get_forward_context().attn_metadata[source.prefix].slot_mapping
    compressor_insert(latents, source.kv_cache, slots, positions, rotary_emb.cos_sin_cache, ratio)


class AmpereDeepseekCompressor(DeepseekCompressor):
    """Pooling is upstream's; the insert into the compressed cache is ours."""

    def insert_cache(self, latent, positions, rotary_emb) -> None:
        if latent is None:  # profile run
            return
        source = self._static_forward_context[self.k_cache_prefix]
        insert_latents(source, latent, positions, rotary_emb, self.compress_ratio)
