# SPDX-License-Identifier: Apache-2.0
"""What ours is compared with: upstream's kernels for the same work, torch, and the other ways to do it.

A rival that cannot run says why; the receipt lists it with that reason. What its interface wants in another form than
ours (a dequantised workspace, padded heads) is prepared outside the timing, in the rival's favour.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from benchmarks import bounds

from vllm.ampere.kernels.attention.reference import combine_topk_swa_ref
from vllm.ampere.kernels.engram.engram_lookup import look_up
from vllm.ampere.kernels.attention.sparse_mla_rows import sparse_mla_rows
from vllm.ampere.kernels.indexer.candidate_topk import mask_to_candidates
from vllm.ampere.kernels.indexer.paged_mqa_logits import paged_mqa_logits
from vllm.ampere.kernels.kv_cache.reference import gather_dequant_slots_ref
from vllm.ampere.kernels.launch import triton, unavailable
from vllm.ampere.kernels.moe.marlin_layout import unpack, unpack_scales
from vllm.ampere.kernels.spec_decode.markov_sampler import OP as MARKOV_SAMPLER

FLASHMLA_DECODE_HEADS = 64
_REPACKED_EXPERTS = 16


@dataclass(frozen=True)
class Rival:
    """One way to do an op's work.

    Attributes:
        name: unique among the rivals of an op.
        against: last word of its figure, "vs-<against>"; the fastest of those that share it counts.
        ops: names of the ops whose place it takes.
        prepare: keyword arguments of our op -> (call, result): `call` is timed, and `result(what call returned)` is
            the tensor to compare with our op's first, or None where there is nothing to compare.
        requires: why it cannot run in this process, or "".
        lowered_like_ours: compiled as our kernels are, instead of for the card.
    """

    name: str
    against: str
    ops: tuple[str, ...]
    prepare: Callable
    requires: Callable[[], str]
    lowered_like_ours: bool = False


def _upstream(capability: tuple[int, int] = (8, 0), only_major: int | None = None) -> str:
    """Why upstream's kernels cannot run: no CUDA build of vLLM, or not this card."""
    if not torch.cuda.is_available():
        return "there is no card"
    if importlib.util.find_spec("vllm._custom_ops") is None:
        return "vLLM is not installed"
    have = torch.cuda.get_device_capability()
    if only_major and have[0] != only_major:
        return f"runs on compute capability {only_major}.x, the card has {have[0]}.{have[1]}"
    if have < capability:
        return f"needs compute capability {capability[0]}.{capability[1]}, the card has {have[0]}.{have[1]}"
    from vllm.platforms import current_platform

    return "" if current_platform.is_cuda() else "the installed vLLM has no CUDA kernels"


def _needs_fp8() -> str:
    return _upstream((8, 9))


def _needs_flashmla() -> str:
    if reason := _upstream(only_major=9):
        return reason
    from vllm.v1.attention.ops.flashmla import is_flashmla_sparse_supported

    return is_flashmla_sparse_supported()[1] or ""


def _needs_deep_gemm() -> str:
    if reason := _upstream((9, 0)):
        return reason
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    return "" if is_deep_gemm_supported() else "vLLM finds no DeepGEMM for this card"


def _needs_tilelang() -> str:
    return _upstream() or ("" if importlib.util.find_spec("tilelang") else "tilelang is not installed")


def _workspace(given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both caches dequantised to bfloat16 [N, 1, 512], and one full list a token: int32 [T, 1, K], [T]."""
    if "rows" in given:
        return given["rows"].unsqueeze(1), given["indices"].unsqueeze(1), given["lens"]
    rows, lists, before = [], [], 0
    for source in ("window", "compressed"):
        cache, slots = given[f"{source}_cache"], given[f"{source}_slots"]
        count = cache.shape[0] * cache.shape[1]
        # The first page is vLLM's null block: not a number in any format.
        every = torch.arange(count, device=cache.device)
        every[: cache.shape[1]] = -1
        rows.append(gather_dequant_slots_ref(cache, every, torch.bfloat16))
        lists.append(slots + before)
        before += count
    indices = torch.cat(lists, 1)
    lens = given["window_lens"] + given["compressed_lens"]
    return torch.cat(rows).unsqueeze(1), indices.unsqueeze(1).contiguous(), lens


def _portable_sparse_mla(given):
    from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface

    kv, indices, _ = _workspace(given)

    def call():
        return triton_bf16_mla_sparse_interface(given["q"], kv, indices, given["scale"], block_dpe=0)

    def result(returned):
        out, _, lse = returned
        return out * torch.sigmoid(lse - given["sink"]).unsqueeze(-1)

    return call, result


def _flashmla_decode(given):
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    heads = given["q"].shape[1]
    padding = FLASHMLA_DECODE_HEADS - heads
    q = torch.nn.functional.pad(given["q"], (0, 0, 0, padding)).unsqueeze(1)
    sink = torch.nn.functional.pad(given["sink"], (0, padding))
    out, plan = torch.empty_like(q), get_mla_metadata()[0]

    def call():
        flash_mla_with_kvcache(
            q=q, k_cache=given["window_cache"].unsqueeze(-2), block_table=None, head_dim_v=512,
            tile_scheduler_metadata=plan, cache_seqlens=None, is_fp8_kvcache=True,
            indices=given["window_slots"].unsqueeze(1), topk_length=given["window_lens"],
            softmax_scale=given["scale"], attn_sink=sink, extra_k_cache=given["compressed_cache"].unsqueeze(-2),
            extra_indices_in_kvcache=given["compressed_slots"].unsqueeze(1),
            extra_topk_length=given["compressed_lens"], out=out,
        )  # fmt: skip

    return call, lambda _: out[:, 0, :heads]


def _flashmla_prefill(given):
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    kv, indices, lens = _workspace(given)
    out = torch.empty_like(given["q"])

    def call():
        flash_mla_sparse_fwd(
            q=given["q"], kv=kv, indices=indices, sm_scale=given["scale"], attn_sink=given["sink"],
            topk_length=lens, out=out,
        )  # fmt: skip

    return call, lambda _: out


def _gathered(given):
    """The same over rows gathered before."""
    kv, indices, lens = _workspace(given)
    lists = indices.squeeze(1), lens
    return lambda: sparse_mla_rows(given["q"], given["sink"], given["scale"], kv.squeeze(1), *lists), lambda out: out


def _upstream_gather(given):
    from vllm.models.deepseek_v41.common.ops.cache_utils import dequantize_and_gather_k_cache_triton

    out = torch.zeros_like(given["out"])

    def call():
        dequantize_and_gather_k_cache_triton(
            out, given["cache"], given["seq_lens"], given["gather_lens"], given["block_table"],
            given["cache"].shape[1], given["offset"],
        )  # fmt: skip

    return call, lambda _: out


def _upstream_combine(given):
    from vllm.models.deepseek_v41.common.ops.cache_utils import combine_topk_swa_indices

    def call():
        return combine_topk_swa_indices(
            given["topk_rows"], given["query_start"], given["seq_lens"], given["gather_lens"], given["window"],
            given["ratio"], given["topk"], given["request_rows"], given["compressed_rows"],
        )  # fmt: skip

    return call, lambda returned: returned[0]


def _torch_combine(given):
    return lambda: combine_topk_swa_ref(**given), lambda returned: returned[0]


def _deep_gemm_logits(given):
    from vllm.utils.deep_gemm import fp8_fp4_mqa_logits

    def call():
        return fp8_fp4_mqa_logits(
            (given["q"], None), (given["keys"], given["key_scales"]), given["weights"], given["starts"],
            given["ends"], given["width"],
        )  # fmt: skip

    return call, lambda logits: _seen(logits[:, : given["width"]], given["ends"] - given["starts"])


def _seen(logits, visible) -> torch.Tensor:
    """What a token does not see set to -inf, since DeepGEMM leaves it as it was."""
    column = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(column >= visible.unsqueeze(-1), -torch.inf)


def _deep_gemm_paged_logits(given):
    """Each query token as a request of its own, as stock vLLM flattens more than two."""
    from vllm.utils.deep_gemm import fp8_fp4_paged_mqa_logits, get_paged_mqa_logits_metadata

    tokens, heads = given["weights"].shape
    lens = given["visible"].unsqueeze(-1)
    table = given["block_table"][given["request"].long()].contiguous()
    cache = given["cache"].unsqueeze(-2)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    plan = get_paged_mqa_logits_metadata(lens, cache.shape[1], processors)
    q = given["q"].view(tokens, 1, heads, 128)

    def call():
        return fp8_fp4_paged_mqa_logits(
            (q, None), cache, given["weights"], lens, table, plan, max_model_len=given["width"]
        )

    return call, lambda logits: _seen(logits[:, : given["width"]], given["visible"])


def _flattened(given):
    """Our own op with each query token as a request of its own."""
    tokens = len(given["request"])
    flat = given | {
        "block_table": given["block_table"][given["request"].long()].contiguous(),
        "request": torch.arange(tokens, dtype=torch.int32, device=given["request"].device),
    }
    return lambda: paged_mqa_logits(**flat), lambda logits: logits


def _dense(given):
    """Our own ops that score every row and mask what is not listed; the listed columns are the result."""
    size, listed = given["block_size"], given["candidates"].long()
    rest = {name: value for name, value in given.items() if name not in ("candidates", "block_size")}
    width = int(given["visible"].max())
    row = (listed.unsqueeze(-1) * size + torch.arange(size, device=listed.device)).flatten(1)

    def call():
        return mask_to_candidates(paged_mqa_logits(**rest, width=width), given["candidates"], size)

    def result(scores):
        return scores.gather(1, row.clamp(0, width - 1)).masked_fill((row < 0) | (row >= width), -torch.inf)

    return call, result


def _torch_topk(given):
    return lambda: torch.topk(given["scores"], given["k"]).indices, lambda rows: rows.int().sort().values


def _upstream_topk_prefill(given):
    from vllm import _custom_ops

    scores, k, (rows, width) = given["scores"], given["k"], given["scores"].shape
    starts = torch.zeros(rows, dtype=torch.int32, device=scores.device)
    ends, out = torch.full_like(starts, width), starts.new_empty(rows, k)

    def call():
        _custom_ops.top_k_per_row_prefill(scores, starts, ends, out, rows, *scores.stride(), k)

    return call, lambda _: out.sort().values


def _upstream_topk_decode(given):
    from vllm import _custom_ops

    scores, k, (rows, width) = given["scores"], given["k"], given["scores"].shape
    lens = torch.full((rows,), width, dtype=torch.int32, device=scores.device)
    out = lens.new_empty(rows, k)

    def call():
        _custom_ops.top_k_per_row_decode(scores, 1, lens, out, rows, *scores.stride(), k)

    return call, lambda _: out.sort().values


@functools.lru_cache(maxsize=1)
def _stock_experts(w13, w13_scale, w2, w2_scale) -> tuple[torch.Tensor, ...]:
    """The same experts as stock vLLM stores them for Marlin: gate before up, all three padded to 128."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

    inner = w13_scale.shape[2] // 2
    wider = -inner % 128
    layer, parts = SimpleNamespace(params_dtype=torch.bfloat16), []
    for first in range(0, len(w13), _REPACKED_EXPERTS):
        some = slice(first, first + _REPACKED_EXPERTS)
        gate_up = [p.unflatten(1, (-1, 2)).transpose(1, 2) for p in (unpack(w13[some]), unpack_scales(w13_scale[some]))]
        gate_up = [torch.nn.functional.pad(part, (0, 0, 0, wider)).flatten(1, 2) for part in gate_up]
        down = unpack(w2[some])[..., : inner // 2], unpack_scales(w2_scale[some])[..., : inner // 32]
        down = [torch.nn.functional.pad(part, (0, wider // step)) for part, step in zip(down, (2, 32))]
        found = prepare_moe_mxfp4_layer_for_marlin(layer, gate_up[0], down[0], gate_up[1], down[1], None, None)
        parts.append(found[:4])
    return tuple(torch.cat(part) for part in zip(*parts))


def _everywhere(given) -> int:
    return -1 if given["expert_map"] is None else len(given["expert_map"])


def _marlin(given):
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    w13, w2, w13_scale, w2_scale = _stock_experts(*(given[n] for n in ("w13", "w13_scale", "w2", "w2_scale")))
    out, config = torch.empty_like(given["out"]), ApplyMoEActivationConfig(clamp_limit=given["limit"])

    def call():
        fused_marlin_moe(
            given["x"], w13, w2, None, None, w13_scale, w2_scale, given["topk_weights"], given["topk_ids"],
            scalar_types.float4_e2m1f.id, global_num_experts=_everywhere(given), expert_map=given["expert_map"],
            output=out, activation_config=config,
        )  # fmt: skip

    return call, lambda _: out


def _marlin_least_padding(given):
    from vllm.ampere.integration.marlin_experts import marlin_experts

    rows, hidden = given["topk_ids"].numel(), given["x"].shape[1]
    inner = given["x"].new_empty(rows * given["w2"].shape[1] * 16)
    wide = given["x"].new_empty(rows * max(hidden, given["w13"].shape[2] // 2))
    scales = [given[name].view(torch.float8_e8m0fnu) for name in ("w13_scale", "w2_scale")]
    out = torch.empty_like(given["out"])

    def call():
        marlin_experts(
            given["x"], given["w13"], scales[0], given["w2"], scales[1], given["topk_weights"], given["topk_ids"],
            out, inner, wide, given["limit"], _everywhere(given), given["expert_map"],
        )  # fmt: skip

    return call, lambda _: out


def _mix_numbers(given):
    """The arguments that upstream's functions have in this order, and the rest by name."""
    order = ("fn", "scale", "base", "rms_eps", "pre_eps", "sinkhorn_eps", "post_alpha", "sinkhorn_iters")
    return [given[name] for name in order], {name: given[name] for name in ("pre_mix", "norm_weight", "norm_eps")}


def _tilelang_post_pre(given):
    """Upstream's fused boundary on the path of a card without DeepGEMM."""
    from vllm.model_executor.kernels.mhc.tilelang import mhc_fused_post_pre_delayed_tilelang

    numbers, named = _mix_numbers(given)
    before = [given[name] for name in ("y", "streams", "post", "comb")]

    def call():
        with mock.patch("vllm.utils.deep_gemm.is_deep_gemm_supported", lambda: False):
            return mhc_fused_post_pre_delayed_tilelang(*before, *numbers, **named, capture_aux=given["capture_aux"])

    return call, lambda returned: returned[0]


def _torch_post_pre(given):
    """Upstream's functions in PyTorch, and the norm after them."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch, mhc_pre_delayed_torch

    numbers, named = _mix_numbers(given)

    def call():
        streams = mhc_post_torch(given["y"], given["streams"], given["post"], given["comb"])
        _, _, collapsed, _ = mhc_pre_delayed_torch(streams, *numbers, pre_mix=named["pre_mix"])
        weight = named["norm_weight"]
        return streams, torch.nn.functional.rms_norm(collapsed, weight.shape, weight, named["norm_eps"])

    return call, lambda returned: returned[0]


class _GivenLogits:
    """Stands for hidden states: what the loop gathers of them, and what the draft model makes of that, is there."""

    def __init__(self, logits):
        self.logits = logits

    def __getitem__(self, indices):
        return self.logits


def upstream_loop(given):
    """Upstream's sampling of a draft block, its own code, on a model that is the two weights of the Markov head."""
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    logits, device = given["base_logits"].flatten(0, 1), given["base_logits"].device
    requests, steps, _ = given["base_logits"].shape
    loop = object.__new__(DSparkSpeculator)
    loop.model = SimpleNamespace(
        compute_draft_logits=lambda hidden: hidden,
        markov_embed=lambda token: torch.nn.functional.embedding(token, given["embed"]),
        markov_bias=lambda embedding: torch.nn.functional.linear(embedding, given["head"]),
        map_draft_to_target=lambda token: token,
    )
    loop.num_speculative_steps, loop.use_fp64_gumbel, loop.use_confidence_head = steps, False, False
    loop._draft_topk = loop.acceptance_estimator = loop.draft_watermarker = loop._d2t_scatter_index = None
    loop.draft_logits, loop.temperature, loop.seeds = (given[n] for n in ("draft_logits", "temperature", "seeds"))
    loop.input_buffers = SimpleNamespace(input_ids=given["last_token"])
    loop.sample_indices = loop._anchor_idx = torch.arange(requests * steps, device=device)
    loop.sample_idx_mapping, loop.sample_pos = given["request"].flatten(), given["position"].flatten()
    loop._step_cols = torch.arange(steps, dtype=torch.int32, device=device)
    loop.draft_tokens = torch.zeros(requests, steps, dtype=torch.int64, device=device)
    return lambda: loop._sample_sequential(requests, _GivenLogits(logits)), lambda _: loop.draft_tokens


def _product_inside(given):
    """Our other implementation, which computes the bias itself."""
    inside = next(i.function for i in MARKOV_SAMPLER.implementations if i.name == "triton-inside")
    return lambda: inside(**given), lambda tokens: tokens


_SPARSE = ("sparse_mla_decode", "sparse_mla_rows")
_PAGED, _TOPK, _EXPERTS = ("paged_mqa_logits",), ("select_topk",), ("mxfp4_experts_decode",)
def _upstream_engram(given):
    """Upstream's kernel with the grid that it takes in the foreground."""
    from vllm.models.deepseek_v41.common.engram import _engram_lookup_kernel

    table, rows = given["table"].view(torch.float8_e4m3fn), given["rows"]
    count, columns = rows.numel(), rows.shape[1]
    out = torch.empty(*rows.shape, table.shape[1], dtype=torch.bfloat16, device=rows.device)
    grid = min(triton.cdiv(count, 16), torch.cuda.get_device_properties(rows.device).multi_processor_count)

    def call():
        _engram_lookup_kernel[(grid,)](
            table, given["scales"], rows, rows, out, given["first_row"], given["end_row"], count, *rows.stride(),
            HEAD_START=0, LOCAL_HEADS=columns, TOTAL_HEADS=columns, DIM=table.shape[1], QUANT_BLOCK=32, BLOCK_R=16,
            GRID=grid, SORTED=False, PACKED=False, OUT_STRIDE=0,
        )  # fmt: skip

    return call, lambda _: out


def _inline_engram(given):
    """The same kernel on the pairs as they come."""
    order = torch.arange(given["rows"].numel(), device=given["rows"].device)
    return lambda: look_up(**given, out=None, order=order), lambda found: found


RIVALS = (
    Rival("gathered", "gathered", ("sparse_mla_prefill",), _gathered, unavailable, lowered_like_ours=True),
    Rival("portable-bf16", "portable-bf16", _SPARSE, _portable_sparse_mla, _upstream, lowered_like_ours=True),
    Rival("flash_mla_with_kvcache", "flashmla", ("sparse_mla_decode",), _flashmla_decode, _needs_flashmla),
    Rival("flash_mla_sparse_fwd", "flashmla", ("sparse_mla_rows",), _flashmla_prefill, _needs_flashmla),
    Rival("upstream-triton", "upstream-triton", ("gather_dequant",), _upstream_gather, _needs_fp8),
    Rival("upstream", "upstream", ("combine_topk_swa",), _upstream_combine, _upstream, lowered_like_ours=True),
    Rival("torch", "torch", ("combine_topk_swa",), _torch_combine, lambda: ""),
    Rival("deepgemm", "deepgemm", ("mqa_logits",), _deep_gemm_logits, _needs_deep_gemm),
    Rival("deepgemm-paged", "deepgemm", _PAGED, _deep_gemm_paged_logits, _needs_deep_gemm),
    Rival("flattened", "flattened", _PAGED, _flattened, unavailable, lowered_like_ours=True),
    Rival("dense", "dense", ("candidate_mqa_logits",), _dense, unavailable, lowered_like_ours=True),
    Rival("top_k_per_row_prefill", "upstream", _TOPK, _upstream_topk_prefill, _upstream),
    Rival("top_k_per_row_decode", "upstream", _TOPK, _upstream_topk_decode, _upstream),
    Rival("torch-topk", "torch", _TOPK, _torch_topk, lambda: ""),
    Rival("fused_marlin_moe", "marlin", _EXPERTS, _marlin, _upstream),
    Rival("marlin_experts", "marlin-least-padding", _EXPERTS, _marlin_least_padding, _upstream, lowered_like_ours=True),
    Rival("upstream-tilelang", "upstream-tilelang", ("mhc_post_pre",), _tilelang_post_pre, _needs_tilelang),
    Rival("upstream-torch", "upstream-torch", ("mhc_post_pre",), _torch_post_pre, _upstream),
    Rival("upstream-loop", "upstream-loop", ("markov_sampler",), upstream_loop, _upstream, lowered_like_ours=True),
    Rival("inside", "inside", ("markov_sampler",), _product_inside, unavailable, lowered_like_ours=True),
    Rival("upstream-engram", "upstream", ("engram_lookup",), _upstream_engram, _needs_fp8),
    Rival("inline", "inline", ("engram_lookup",), _inline_engram, unavailable, lowered_like_ours=True),
    Rival("empty-kernel", "empty-kernel", ("merge_attn_states",), bounds.empty, unavailable, lowered_like_ours=True),
    Rival("one-load", "one-load", ("merge_attn_states",), bounds.one_load, unavailable, lowered_like_ours=True),
    Rival("copy-of-rows", "copy", ("gather_dequant",), bounds.copy_of_rows, unavailable, lowered_like_ours=True),
    Rival("copy-of-keys", "copy", ("key_norm_rope_store",), bounds.copy_of_keys, unavailable, lowered_like_ours=True),
)


def rivals_of(op: str, wanted: tuple[str, ...]) -> list[Rival]:
    """The rivals of an op that stand for one of the `wanted` figures."""
    return [rival for rival in RIVALS if op in rival.ops and rival.against in wanted]
