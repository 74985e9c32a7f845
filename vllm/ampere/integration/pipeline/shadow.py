# SPDX-License-Identifier: Apache-2.0
"""A KV source that is on an earlier stage, as this stage has it: its caches, and what writes them."""

import copy

import torch
from torch import nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.models.deepseek_v41 import attention as upstream

from .. import warmup
from ..compressor import insert_latents
from ..indexer import store_keys


class ShadowIndexer(nn.Module):
    """The half of the source's indexer that makes keys: `wk`, `k_norm` and the key cache."""

    def __init__(self, vllm_config, prefix: str, ratio: int):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.compress_ratio = ratio
        self.wk = ReplicatedLinear(
            config.head_dim, config.index_head_dim, bias=False, quant_config=None, prefix=f"{prefix}.wk"
        )
        self.k_norm = RMSNorm(config.index_head_dim, config.rms_norm_eps)
        width = upstream._indexer_k_cache_head_dim(config.index_head_dim, upstream.dsa_indexer_uses_fp4(vllm_config))
        self.k_cache = upstream.DeepseekV4IndexerCache(
            width, torch.uint8, f"{prefix}.k_cache", vllm_config.cache_config, ratio
        )


class ShadowSource(nn.Module, AttentionLayerBase):
    """The source under its own layer names, so that the layers of this stage find it as they are built.

    vLLM merges the cache groups of all stages by layer name: both copies are one member of one group, with the same
    blocks and slots, and a block that is valid in one copy is valid in the other.

    Args:
        vllm_config: of the engine.
        prefix: the source attention layer's name.
        ratio: its tokens per compressed row.
        keys: this stage scores the source's index keys, so it needs a copy of them too.
    """

    def __init__(self, vllm_config, prefix: str, ratio: int, keys: bool):
        super().__init__()
        self.prefix, self.compress_ratio = prefix, ratio
        self.kv_cache = torch.tensor([])
        vllm_config.compilation_config.static_forward_context[prefix] = self
        self.indexer = ShadowIndexer(vllm_config, f"{prefix}.indexer", ratio) if keys else None
        warmup.register_shadow(self)

    def follow(self, reader) -> None:
        """Take record format and rotary tables of `reader`, an attention layer here that reads these rows."""
        source = copy.copy(reader)
        source.is_kv_source = True
        # Not as a submodule: the reader's weights are the reader's.
        self._as_source = (source,)

    def insert(self, latents: torch.Tensor, positions: torch.Tensor) -> None:
        """Write a step's rows as the source wrote them, from the same bytes with the same kernels.

        Args:
            latents: bfloat16 [T, 512], normed, without RoPE. Rows that complete no group of `ratio` tokens hold
                anything and are not read.
            positions: int64 [T].
        """
        if not isinstance(get_forward_context().attn_metadata, dict):  # profile run: no cache is bound
            return
        (source,) = self._as_source
        insert_latents(self, latents, positions, source.rotary_emb, self.compress_ratio)
        if self.indexer is not None:
            store_keys(self.indexer, latents, positions, source.indexer_rotary_emb)

    def load(self, name: str, weight: torch.Tensor) -> str:
        """Take a tensor of the source if it is needed here; returns its parameter's name in this module, or ""."""
        own = name.removeprefix("indexer.")
        if self.indexer is None or own not in ("wk.weight", "k_norm.weight"):
            return ""
        parameter = self.indexer.get_parameter(own)
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, weight)
        return f"indexer.{own}"

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        # [B, H=1, N, C] -> [B, N, C]
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config):
        (source,) = self._as_source
        return source.get_kv_cache_spec(vllm_config)

    def get_attn_backend(self):
        (source,) = self._as_source
        return source.get_attn_backend()
