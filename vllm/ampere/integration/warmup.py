# SPDX-License-Identifier: Apache-2.0
"""Every kernel that serving can reach is compiled before the first request.

Upstream's warm-up registry compiles, at start-up, what the model's layers registered while they were built. Ours
register themselves there, with upstream's mHC and log-probability kernels, which serve this model without having been
registered. No run-time size picks a binary of our kernels: sizes and strides that follow the batch or the context are
not specialised, nor is the alignment of metadata, which is sliced at any token. So one call of an op compiles it for
all batches, except for the constants enumerated here.
"""

import functools
from dataclasses import dataclass

import torch
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.platforms import current_platform

from ..kernels.indexer.candidate_topk_triton import chunk_entries
from ..kernels.mhc.mhc_post_pre_triton import tiling
from ..kernels.registry import Case, all_ops
from .mhc import serves as our_boundary_serves
from .spec_decode import upstream_asked

# Rows a page, and columns: any multiple of 16 gives the same binary.
_ROWS, _COLUMNS, _POSITIONS = 64, 64, 64
# Where the engine sets no limit; the chat interface has 20.
_MOST_LOGPROBS = 64
# Of a batch; the boundary's tiling changes for the last time at 2,049.
_MOST_TOKENS = 16_384


@dataclass(frozen=True)
class Call:
    """One call of an op on random arguments.

    Attributes:
        op: its name.
        sizes: of its first case, as pairs.
    """

    op: str
    sizes: tuple[tuple[str, int | bool], ...]

    def inputs(self, device: str | torch.device) -> dict:
        return Case("", dict(self.sizes), all_ops()[self.op].cases[0].make).inputs(device=device)

    def run(self, device: str | torch.device) -> None:
        all_ops()[self.op].choose(device)(**self.inputs(device))


def _call(op: str, **sizes: int) -> Call:
    return Call(op, tuple(sizes.items()))


def insert_call(ratio: int) -> Call:
    return _call("compressor_insert", T=1, S=1, B=2, P=_ROWS, ratio=ratio)


def key_call(indexer) -> Call:
    return _call("key_norm_rope_store", T=1, P=indexer.k_cache.kv_cache.shape[1], M=_POSITIONS, ratio=indexer.compress_ratio)


def calls(layer) -> list[Call]:
    """The calls that compile whatever a layer's attention, compressor and indexer can launch.

    Args:
        layer: an `AmpereDeepseekV4Attention`, its index cache bound.
    """
    heads, ratio = layer.n_local_heads, layer.compress_ratio
    lists = {"H": heads, "W": 128, "K": _COLUMNS if ratio else 0, "P": _ROWS, "Q": _ROWS}
    found = [
        _call("inverse_rope", T=1, H=heads, M=_POSITIONS),
        # Split and merged; then not split, which many decode tokens are not either. One token has blocks of fewer heads.
        *(_call(op, T=tokens, **lists) for op in ("sparse_mla_decode", "sparse_mla_prefill") for tokens in (1, 8)),
        *(_call("merge_attn_states", S=splits, T=1, H=heads) for splits in (2, 4, 8, 16, 32, 64)),  # of more or fewer tokens
        _call("sparse_mla_rows", T=1, H=heads, N=_ROWS, L=_COLUMNS),
        _call("combine_topk_swa", lengths=(1,), C=_COLUMNS, ratio=ratio, window=128),
        _call("gather_dequant", lengths=(1,), P=_ROWS, tail=1),
    ]
    if ratio:
        found.append(_call("gather_dequant", lengths=(1,), P=_ROWS, tail=None))
        found.append(_call("topk_slots", T=1, K=_COLUMNS, ratio=ratio, page_rows=_ROWS))
    if layer.is_kv_source:
        found.append(insert_call(ratio))
    return found if layer.indexer is None else found + _index_calls(layer.indexer)


def _index_calls(indexer) -> list[Call]:
    heads, selection = indexer.n_head, indexer.indexer_op
    page, selected = indexer.k_cache.kv_cache.shape[1], indexer.topk_indices_buffer.shape[1]
    chunk = chunk_entries(selected)
    found = [_call("query_rope_quant", T=1, N=heads, M=_POSITIONS)]
    if indexer.owns_k:
        found.append(key_call(indexer))
    scores = {"T": 1, "N": heads, "R": 1, "P": page, "S": page}
    if selection.candidate_blocks is None or selection.candidate_write:
        for tokens in (1, 6):  # of one request: one in a program, and six
            found.append(_call("paged_mqa_logits", **scores | {"T": tokens}, fill=0))
        found.append(_call("select_topk", T=1, S=2 * chunk, K=selected, bounded=1))  # two chunks: both kinds of round
    if selection.candidate_blocks is None:
        return found
    blocks, size = selection.candidate_blocks.shape[1], selection.candidate_block_size
    if selection.candidate_write:
        width = 2 * size * chunk_entries(blocks)
        return [*found, _call("candidate_blocks", T=1, S=width, C=blocks, block_size=size)]
    found.append(_call("candidate_mqa_logits", **scores, L=1, block_size=size))
    for listed in (_COLUMNS, chunk):  # in one round, and in two
        found.append(_call("select_topk", T=1, S=listed * size, C=listed, K=selected, bounded=1, block_size=size))
    return found


class AmpereKernels(VllmJitKernel[Call]):
    """Our kernels, as one entry of upstream's registry."""

    def get_warmup_keys(self, layer) -> list[Call]:
        return calls(layer)

    def compile(self, compile_key: Call) -> None:
        compile_key.run(current_platform.device_type)


class ShadowKernels(AmpereKernels):
    """What writes the caches of a `pipeline.shadow.ShadowSource`."""

    def get_warmup_keys(self, shadow) -> list[Call]:
        keys = [] if shadow.indexer is None else [key_call(shadow.indexer)]
        return [insert_call(shadow.compress_ratio), *keys]


class DraftKernels(AmpereKernels):
    """What samples the draft block."""

    def get_warmup_keys(self, vllm_config) -> list[Call]:
        drafts = vllm_config.speculative_config
        if drafts is None or not drafts.use_dspark() or upstream_asked():
            return []
        noise = drafts.draft_sample_method == "probabilistic"
        shards = not noise and vllm_config.parallel_config.tensor_parallel_size > 1
        rank = vllm_config.model_config.hf_config.dspark_markov_rank
        steps = drafts.num_speculative_tokens
        return [_call("markov_sampler", R=1, S=steps, V=_COLUMNS, F=rank, drafts=noise, shards=shards)]


class BoundaryKernels(AmpereKernels):
    """What computes the boundary between two sublayers, for batches that are not upstream's."""

    def get_warmup_keys(self, hidden: int) -> list[Call]:
        """The least batch of each tiling, without the mean of the streams and with it."""
        least = {tiling(tokens): tokens for tokens in range(_MOST_TOKENS, 0, -1) if our_boundary_serves(tokens)}
        return [_call("mhc_post_pre", T=tokens, D=hidden, aux=aux) for tokens in least.values() for aux in (False, True)]


class TokenLogprobs(VllmJitKernel[int]):
    """Upstream's log-probabilities of chosen tokens, whose block follows the number that a request asks for."""

    def get_warmup_keys(self, vllm_config) -> list[int]:
        """Column counts, one for each binary: the sampled token and as many others as a request may ask for."""
        asked = vllm_config.model_config.max_logprobs
        self._vocabulary = vllm_config.model_config.get_vocab_size()
        columns = range(1, 2 + (asked if 0 <= asked < _MOST_LOGPROBS else _MOST_LOGPROBS))
        return list({((n - 1).bit_length(), n == 1, n % 16 == 0): n for n in reversed(columns)}.values())

    def compile(self, compile_key: int) -> None:
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        device = current_platform.device_type
        logits = torch.zeros(1, self._vocabulary, device=device)
        compute_token_logprobs(logits, torch.zeros(1, compile_key, dtype=torch.int64, device=device))


KERNELS, SHADOW_KERNELS, DRAFT_KERNELS = AmpereKernels(), ShadowKernels(), DraftKernels()
BOUNDARY_KERNELS, TOKEN_LOGPROBS = BoundaryKernels(), TokenLogprobs()


def register(layer, vllm_config) -> None:
    """Register what an attention layer and the sublayers around it launch, while the layer is built on a GPU."""
    if not current_platform.is_cuda():
        return
    from vllm.model_executor.kernels.mhc import tilelang_kernels as mhc

    KERNELS.register_warmup(layer)
    DRAFT_KERNELS.register_warmup(vllm_config)
    TOKEN_LOGPROBS.register_warmup(vllm_config)
    hidden, streams = layer.hidden_size, vllm_config.model_config.hf_config.hc_mult
    BOUNDARY_KERNELS.register_warmup(hidden)
    for columns in (hidden, streams * hidden):  # one stream in the first layer
        mhc._HC_PRENORM_GEMM_TILELANG_KERNEL.register_warmup(
            vllm_config, hidden_size=columns, hc_mult=1, n_out=streams * (streams + 2)
        )
    if mhc.mhc_fused_post_pre_splits(hidden, streams):
        mhc._MHC_FUSED_TILELANG_KERNEL.register_warmup(vllm_config, hidden_size=hidden, hc_mult=streams)
    mhc._MHC_POST_TILELANG_KERNEL.register_warmup(hidden_size=hidden, hc_mult=streams)


def expert_calls(hidden: int, width: int, chosen: int, spread: bool, most_tokens: int) -> list[Call]:
    """The calls that compile `mxfp4_experts_decode` for experts of a shape and up to so many tokens."""
    sizes = {"E": chosen, "D": hidden, "I": width, "K": chosen, "R": 1 + spread}
    return [_call("mxfp4_experts_decode", T=tokens, **sizes) for tokens in range(1, most_tokens + 1)]


@functools.cache
def compile_experts(*shape) -> None:
    """Make the calls of `expert_calls(*shape)`, at once: the draft's experts load under no registry."""
    if current_platform.is_cuda():
        for call in expert_calls(*shape):
            call.run(current_platform.device_type)


def register_shadow(shadow) -> None:
    """Register what the stage's copy of a KV source launches."""
    if current_platform.is_cuda():
        SHADOW_KERNELS.register_warmup(shadow)
