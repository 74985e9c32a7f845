# SPDX-License-Identifier: Apache-2.0
"""On live inputs, behind each kernel of one side runs the other side's, and both are compared.

`behind_upstream`: on a native run of a Hopper card ours follow upstream's. Ours are lowered for that card there, since
upstream's have to be. `behind_ours`: on our path, on any card, the op's reference follows each kernel.
`FOUND` collects, by name, the number of calls and the worst of each measure.
"""

import inspect

import torch

from vllm.ampere import arch
from vllm.ampere.kernels.attention.inverse_rope import inverse_rope
from vllm.ampere.kernels.engram.engram_lookup import engram_lookup
from vllm.ampere.kernels.indexer.key_norm_rope_store import key_norm_rope_store
from vllm.ampere.kernels.indexer.mqa_logits import mqa_logits
from vllm.ampere.kernels.indexer.query_rope_quant import query_rope_quant
from vllm.ampere.kernels.kv_cache.compressor_insert import compressor_insert
from vllm.ampere.kernels.kv_cache.gather_dequant import gather_dequant
from vllm.ampere.kernels.kv_cache.window_insert import window_insert
from vllm.ampere.kernels.registry import Op
from vllm.ampere.testing.parity import produce

FOUND: dict[str, dict[str, float]] = {}


def note(name: str, ours: torch.Tensor, native: torch.Tensor) -> None:
    """Count a call; keep the worst relative norm, the worst difference over the native rms, and of bytes the worst step."""
    seen = FOUND.setdefault(name, {"calls": 0, "relative_norm": 0.0, "worst": 0.0, "bytes_off": 0, "byte_step": 0, "bytes": 0})
    seen["calls"] += 1
    assert ours.shape == native.shape, (name, ours.shape, native.shape)
    if not ours.numel():
        return
    if ours.dtype == torch.uint8:
        step = (ours.int() - native.int()).abs()
        seen["bytes"] += ours.numel()
        seen["bytes_off"] += int((step > 0).sum())
        seen["byte_step"] = max(seen["byte_step"], int(step.max()))
        return
    ours, native = ours.double(), native.double()
    assert ours.isfinite().equal(native.isfinite()), f"{name}: finite in one of the two only"
    ours, native = (torch.where(x.isfinite(), x, 0.0) for x in (ours, native))
    difference, size = ours - native, native.norm().clamp_min(1e-30)
    seen["relative_norm"] = max(seen["relative_norm"], (difference.norm() / size).item())
    seen["worst"] = max(seen["worst"], (difference.abs().max() / (size / native.numel() ** 0.5)).item())


def _copy(written):
    return tuple(map(torch.clone, written)) if isinstance(written, tuple) else written.clone()


def behind_ours() -> None:
    """Wrap the choice of every op's implementation, before the first is made."""
    chosen = Op.choose_for

    def choose_for(op, architecture, name=None):
        function = chosen(op, architecture, name)
        signature = inspect.signature(function)

        def both(*args, **named):
            given = signature.bind(*args, **named).arguments
            given |= {"fill": True} if "fill" in given else {}  # what nobody reads is compared too
            # What is written is each kernel's own: in one tensor the second result would hide the first.
            copies = {n: _copy(given[n]) for n in {*op.mutates, "out"} if given.get(n) is not None}
            got = produce(op, function, given)
            want = produce(op, op.reference, given | copies)
            for output, tensor in got.items():
                note(f"{op.name}: {output}", tensor, want[output])
            results = tuple(got[arg.name] for arg in op.outputs)
            return results if len(results) > 1 else results[0] if results else None

        return both

    Op.choose_for = choose_for


def behind_upstream() -> None:
    """Wrap every function of upstream that has a twin of ours, before the model is built."""
    arch.of_device = lambda device: arch.SM80
    _wrap_attention()
    _wrap_indexer()
    _wrap_writers()
    _wrap_engram()


def _wrap_attention() -> None:
    import vllm.models.deepseek_v4.nvidia.ops.o_proj as o_proj
    import vllm.models.deepseek_v41.nvidia.flashmla as flashmla
    from vllm.ampere.integration.attention import AmpereDeepseekV4Attention as Ours
    from vllm.forward_context import get_forward_context

    native_gather = flashmla.dequantize_and_gather_k_cache
    native_rotate = o_proj.fused_inv_rope_fp8_quant
    native_forward = flashmla.DeepseekV4FlashMLAAttention.forward_mqa

    class Twin:
        """The native layer with our methods: what is not ours is the layer's."""

        _replay_rows = 0
        _selected = Ours._selected

        def __init__(self, layer):
            self.layer, self.attn_sink = layer, layer.attn_sink[: layer.n_local_heads].contiguous()

        def __getattr__(self, name):
            return getattr(self.layer, name)

    def forward_mqa(layer, q, kv, positions, output):
        native_forward(layer, q, kv, positions, output)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return
        heads, window = layer.n_local_heads, metadata[layer.swa_cache_layer.prefix]
        ours = torch.full((len(q), heads, q.shape[2]), torch.nan, dtype=q.dtype, device=q.device)
        Ours.forward_mqa(Twin(layer), q[:, :heads].contiguous(), kv, positions, ours)
        decodes, source = window.num_decode_tokens, "window" if layer.compress_ratio == 0 else "window and selection"
        rows = decodes + window.num_prefill_tokens
        note(f"decode, {source}", ours[:decodes], output[:decodes, :heads])
        note(f"prefill, {source}", ours[decodes:rows], output[decodes:rows, :heads])

    def gather(out, cache, seq_lens, gather_lens, block_table, block_size, offset, *rest, **named):
        ours = out.clone()
        native_gather(out, cache, seq_lens, gather_lens, block_table, block_size, offset, *rest, **named)
        gather_dequant(cache, seq_lens, gather_lens, block_table, ours, offset)
        note("gather of records", ours, out)

    def rotate(o, positions, cos_sin, *, n_groups, heads_per_group, **named):
        native = native_rotate(o, positions, cos_sin, n_groups=n_groups, heads_per_group=heads_per_group, **named)
        note("inverse rotation", inverse_rope(o, positions, cos_sin).flatten(1), native[0].reshape(len(o), -1))
        return native

    flashmla.DeepseekV4FlashMLAAttention.forward_mqa = forward_mqa
    flashmla.dequantize_and_gather_k_cache = gather
    o_proj.fused_inv_rope_fp8_quant = rotate


def _wrap_indexer() -> None:
    import vllm.model_executor.layers.sparse_attn_indexer as layer
    import vllm.models.deepseek_v41.attention as attention
    from vllm.ampere.integration.indexer import AmpereSparseAttnIndexer as Ours
    from vllm.forward_context import get_forward_context

    native_quantise, native_logits = attention.fused_indexer_q_rope_quant, layer.fp8_fp4_mqa_logits
    native_forward = layer.SparseAttnIndexer.forward_cuda

    class Twin:
        """The native indexer that publishes into buffers of its own."""

        _select_rows, _select_listed_rows = Ours._select_rows, Ours._select_listed_rows

        def __init__(self, indexer):
            self.indexer = indexer
            self.topk_indices_buffer = torch.full_like(indexer.topk_indices_buffer, -7)
            if indexer.candidate_write:
                self.candidate_blocks = torch.full_like(indexer.candidate_blocks, -7)
            elif indexer.candidate_blocks is not None:  # upstream lists in no order
                listed = indexer.candidate_blocks
                self.candidate_blocks = torch.where(listed < 0, 2**31 - 1, listed).sort(1).values

        def __getattr__(self, name):
            return getattr(self.indexer, name)

    def quantise(positions, q, cos_sin, weights, softmax_scale, head_scale, *rest, **named):
        native = native_quantise(positions, q, cos_sin, weights, softmax_scale, head_scale, *rest, **named)
        codes, folded = query_rope_quant(q, positions, cos_sin, weights, softmax_scale, head_scale)
        note("index query bytes", codes.view(torch.uint8), native[0].view(torch.uint8))
        note("index query weights", folded, native[1])
        return native

    def logits(q, kv, weights, starts, ends, width, *rest, **named):
        native = native_logits(q, kv, weights, starts, ends, width, *rest, **named)
        ours = mqa_logits(q[0], weights, kv[0], kv[1], starts, ends, width)
        visible = torch.arange(ours.shape[1], device=ours.device) < (ends - starts)[:, None]
        note("index scores, prefill", torch.where(visible, ours, 0), torch.where(visible, native[:, : ours.shape[1]], 0))
        return native

    def forward(indexer, hidden_states, q, k, weights):
        published = native_forward(indexer, hidden_states, q, k, weights)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            index = metadata[indexer.k_cache.prefix]
            twin, rows = Twin(indexer), index.num_decode_tokens + index.num_prefill_tokens
            Ours._select(twin, hidden_states, q, k, weights)
            note("selected rows", *_as_marks(twin.topk_indices_buffer[:rows], published[:rows], index.max_seq_len))
            if indexer.candidate_write:
                blocks = index.max_seq_len // indexer.candidate_block_size + 1
                note("candidate blocks", *_as_marks(twin.candidate_blocks[:rows], indexer.candidate_blocks[:rows], blocks))
        return published

    attention.fused_indexer_q_rope_quant = quantise
    layer.fp8_fp4_mqa_logits = logits
    layer.SparseAttnIndexer.forward_cuda = forward


def _as_marks(ours: torch.Tensor, native: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Index lists [T, K], -1 for none, as marks [T, width]: order does not matter, and a difference of sets is counted."""
    marks = []
    for listed in (ours, native):
        row = torch.zeros(len(listed), width + 2, device=listed.device)
        marks.append(row.scatter(1, listed.long().clamp(-1, width) + 1, 1.0)[:, 1:])
    return marks


def _wrap_writers() -> None:
    import vllm.models.deepseek_v41.attention as attention
    import vllm.models.deepseek_v41.compressor as compressor

    def written(name, native, ours, cache_at, slots_at):
        """Both write the same cache, ours first onto a copy of the pages that the slots name."""

        def both(*given, **named):
            cache, slots = given[cache_at], given[slots_at]
            pages = torch.div(slots[slots >= 0], cache.shape[1], rounding_mode="floor").unique()
            before = cache[pages].clone()
            ours(*given)
            mine = cache[pages].clone()
            cache[pages] = before
            native(*given, **named)
            note(name, mine, cache[pages])

        return both

    attention.indexer_k_norm_rope_store = written(
        "index key bytes", attention.indexer_k_norm_rope_store,
        lambda k, positions, table, weight, eps, cache, slots, ratio, *_: key_norm_rope_store(
            k, positions, table, weight, eps, cache, slots, ratio), 5, 6)
    compressor.rope_quant_insert = written(
        "compressed record bytes", compressor.rope_quant_insert,
        lambda latent, positions, table, cache, slots, ratio, *_: compressor_insert(
            latent, cache, slots, positions, table, ratio), 3, 4)
    native_insert = attention.DeepseekV4Attention._fused_qnorm_rope_kv_insert

    def insert(layer, q, kv, positions, metadata):
        window = metadata.get(layer.swa_cache_layer.prefix) if isinstance(metadata, dict) else None
        if window is None:
            return native_insert(layer, q, kv, positions, metadata)
        cache, slots = layer.swa_cache_layer.kv_cache, window.slot_mapping
        pages = torch.div(slots[slots >= 0], cache.shape[1], rounding_mode="floor").unique()
        before = cache[pages].clone()
        window_insert(kv, cache, slots, positions, layer.rotary_emb.cos_sin_cache)
        mine = cache[pages].clone()
        cache[pages] = before
        out = native_insert(layer, q, kv, positions, metadata)
        note("window record bytes", mine, cache[pages])
        return out

    attention.DeepseekV4Attention._fused_qnorm_rope_kv_insert = insert


def _wrap_engram() -> None:
    import vllm.models.deepseek_v41.common.engram as engram

    native_lookup = engram.ParallelEngramEmbedding.lookup

    def lookup(embedding, indices, out, *rest, **named):
        result = native_lookup(embedding, indices, out, *rest, **named)
        table, scales = embedding._storage()
        own = indices[:, embedding.head_start : embedding.head_start + embedding.part_n_hash_cols]
        ours = engram_lookup(table.view(torch.uint8), scales, own, embedding.vocab_start_idx, embedding.vocab_end_idx)
        note("engram rows", ours, out[: len(own), : own.shape[1]])
        return result

    engram.ParallelEngramEmbedding.lookup = lookup
