# SPDX-License-Identifier: Apache-2.0
"""What serving launches was compiled at start-up: the keys of both are recorded on the CPU and compared."""

import json
import types
from pathlib import Path

import pytest
import torch

from vllm.ampere.kernels.launch import tl, triton, unavailable
from vllm.ampere.kernels.registry import all_ops
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import OPTIONS, run
from vllm.ampere.testing.specialization import key, recorded_launches

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]
INDEX_HEADS, TOPK, BLOCKS, BLOCK_SIZE, PAGE = 32, 512, 2048, 8, 64


def layer(heads: int, ratio: int, source: bool, write: bool | None):
    """What the warm-up reads of an attention layer; one without an indexer if `write` is None."""
    selection = types.SimpleNamespace(
        candidate_blocks=torch.empty(1, BLOCKS, dtype=torch.int32), candidate_block_size=BLOCK_SIZE,
        candidate_write=write,
    )
    indexer = types.SimpleNamespace(
        n_head=INDEX_HEADS, owns_k=source, compress_ratio=ratio, indexer_op=selection,
        k_cache=types.SimpleNamespace(kv_cache=torch.empty(1, PAGE, 132, dtype=torch.uint8)),
        topk_indices_buffer=torch.empty(1, TOPK, dtype=torch.int32),
    )
    return types.SimpleNamespace(
        n_local_heads=heads, compress_ratio=ratio, is_kv_source=source, indexer=None if write is None else indexer
    )


LAYERS = ((0, False, None), (2, True, True), (1, True, False))


def launch(name: str, **arguments) -> None:
    all_ops()[name].implementations[0].function(**arguments)


def cache(page_rows: int, pages: int = 4) -> torch.Tensor:
    return torch.empty(pages, page_rows, 584, dtype=torch.uint8)


def serve_attention(heads: int, rows: int, first: int, requests: int) -> None:
    """Launches of a step's attention; its metadata is sliced at any row, as where prefill rows follow decode rows."""

    def sliced(*shape, dtype=torch.int32):
        return torch.empty(first + rows, *shape, dtype=dtype)[first:]

    positions, slots = sliced(dtype=torch.int64), sliced(dtype=torch.int64)
    table = torch.empty(requests, 17 + requests, dtype=torch.int32)
    rotary = torch.empty(64, 64)
    q = sliced(heads, 512, dtype=torch.bfloat16)
    window = {"window_cache": cache(32), "window_slots": sliced(133), "window_lens": sliced()}
    selected = {"compressed_cache": cache(64), "compressed_slots": sliced(TOPK), "compressed_lens": sliced()}
    for op in ("sparse_mla_decode", "sparse_mla_prefill"):
        for lists in (window, window | selected):
            launch(op, q=q, sink=torch.empty(heads), scale=0.1, **lists, out=torch.empty_like(q))
    launch("inverse_rope", o=q, positions=positions, cos_sin=rotary)
    seq_lens, starts = torch.empty(requests + 3, dtype=torch.int32)[rows % 3:][:requests], torch.empty(requests + 1, dtype=torch.int32)
    gathered = torch.empty(requests, 40 + rows, 512, dtype=torch.bfloat16)
    for ratio, width in ((0, 128), (1, 640)):
        lists = torch.empty(rows, width, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        launch("gather_dequant", cache=cache(32), seq_lens=seq_lens, gather_lens=seq_lens, block_table=table[:, 1:], out=gathered,
               offset=rows)
        launch("combine_topk_swa", topk_rows=torch.empty(rows, TOPK, dtype=torch.int32), query_start=starts, seq_lens=seq_lens,
               gather_lens=seq_lens, window=128, ratio=ratio, topk=TOPK if ratio else 0, request_rows=40 + rows,
               compressed_rows=rows, out=lists)
        launch("sparse_mla_rows", q=q, sink=torch.empty(heads), scale=0.1, rows=gathered.flatten(0, 1), indices=lists[0],
               lens=lists[1], out=torch.empty_like(q))
    launch("gather_dequant", cache=cache(64), seq_lens=seq_lens, gather_lens=None, block_table=table, out=gathered, offset=0)
    latent, keys = sliced(512, dtype=torch.bfloat16), sliced(128, dtype=torch.bfloat16)
    for ratio in (1, 2):
        launch("topk_slots", topk=sliced(TOPK), request=sliced(), block_table=table, positions=positions, ratio=ratio,
               page_rows=64)
        launch("compressor_insert", latent=latent, cache=cache(64), slots=slots, positions=positions, cos_sin=rotary,
               ratio=ratio)
        launch("key_norm_rope_store", k=keys, positions=positions, cos_sin=rotary, slots=slots, eps=1e-6, ratio=ratio,
               norm_weight=torch.empty(128, dtype=torch.bfloat16), cache=torch.empty(4, PAGE, 132, dtype=torch.uint8))


def serve_drafts(requests: int, vocabulary: int, steps: int, noise: bool) -> None:
    """A draft block of states in any order; without noise it is a shard's, whose logits are a slice of wider rows."""
    logits = torch.empty(requests, steps, vocabulary + 64, dtype=torch.bfloat16)[..., :vocabulary]
    if noise:
        logits = torch.empty(requests, steps, vocabulary, dtype=torch.bfloat16)
    states, placed = torch.empty(40, dtype=torch.int64), torch.zeros(requests, steps, dtype=torch.int64)
    weights = torch.empty(2, 2 * vocabulary, 256, dtype=torch.bfloat16)
    launch("markov_sampler", base_logits=logits, embed=weights[0], head=weights[1, vocabulary:], request=placed,
           last_token=torch.zeros(requests, dtype=torch.int32), position=placed, temperature=states.float(),
           seeds=states, draft_logits=torch.empty(40, steps, 2 * vocabulary, dtype=torch.bfloat16) if noise else None,
           first_token=vocabulary, exchange=None if noise else lambda words: words[None].repeat(requests, 1))


def serve_index(rows: int, first: int, width: int) -> None:
    """Launches of an indexer on a slice of rows, at a context that gives scores of some width."""
    q = torch.empty(rows, INDEX_HEADS, 128, dtype=torch.bfloat16)
    weights = torch.empty(rows, INDEX_HEADS + 3, dtype=torch.bfloat16)[:, 3:]
    positions = torch.empty(first + rows, dtype=torch.int64)[first:]
    launch("query_rope_quant", q=q, positions=positions, cos_sin=torch.empty(64, 64), weights=weights,
           softmax_scale=0.1, head_scale=0.1)
    request, visible = (torch.empty(first + rows, dtype=torch.int32)[first:] for _ in range(2))
    given = (
        q.to(torch.float8_e4m3fn), torch.empty(rows, INDEX_HEADS), torch.empty(4, PAGE, 132, dtype=torch.uint8),
        torch.empty(3, 1 + width // PAGE, dtype=torch.int32),
    )
    scores = all_ops()["paged_mqa_logits"].implementations[0].function(*given, request, visible, width, False)
    launch("candidate_blocks", scores=scores, visible=visible, blocks=BLOCKS, block_size=BLOCK_SIZE)
    launch("select_topk", scores=scores, k=TOPK, visible=visible)
    listed = torch.empty(first + rows, BLOCKS, dtype=torch.int32)[first:, : -(-width // BLOCK_SIZE)]
    inside = all_ops()["candidate_mqa_logits"].implementations[0].function(
        *given, request, visible, listed, BLOCK_SIZE
    )
    launch("select_topk", scores=inside, k=TOPK, visible=visible, candidates=listed, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("method, ranks", [("greedy", 2), ("probabilistic", 1), ("probabilistic", 8)])
def test_every_draft_block_reaches_exactly_what_was_warmed(method, ranks):
    from vllm.ampere.integration.warmup import DRAFT_KERNELS

    config = types.SimpleNamespace(
        speculative_config=types.SimpleNamespace(
            use_dspark=lambda: True, draft_sample_method=method, num_speculative_tokens=5),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=ranks),
        model_config=types.SimpleNamespace(hf_config=types.SimpleNamespace(dspark_markov_rank=256)),
    )
    with recorded_launches() as warmed:
        for call in DRAFT_KERNELS.get_warmup_keys(config):
            launch(call.op, **call.inputs("cpu"))
    with recorded_launches() as served:
        for requests in range(1, 34):
            serve_drafts(requests, (1616, 3232)[requests % 2], 5, method == "probabilistic")
    assert served == warmed and len(served) == (2 if method == "greedy" else 1)


@pytest.mark.parametrize("width, count, chosen, mapped, tokens", [
    (288, 384, 6, False, 1), (576, 384, 6, False, 1), (2304, 48, 6, True, 1),  # TP8, TP4, EP8
    (288, 128, 3, False, 1), (2304, 16, 3, True, 1),  # their drafts
    (288, 384, 6, False, 16),  # asked for by name
])
def test_every_batch_that_the_experts_take_reaches_exactly_what_was_warmed(width, count, chosen, mapped, tokens):
    """Whatever the rank holds, and wherever the batch begins in its tensors; ids as upstream's router makes them.

    Experts are compiled while weights are loaded, when the model's dtype is torch's default.
    """
    from vllm.utils.torch_utils import set_default_torch_dtype

    from vllm.ampere.expert_layout import down_inputs
    from vllm.ampere.integration.warmup import expert_calls

    with recorded_launches() as warmed, set_default_torch_dtype(torch.bfloat16):
        for call in expert_calls(5120, width, chosen, mapped, tokens):
            launch(call.op, **call.inputs("cpu"))
    held = down_inputs(width)
    weights = {  # never touched: the launches are recorded
        "w13": torch.empty(count, 320, 4 * width, dtype=torch.int32),
        "w13_scale": torch.empty(count, 160, 2 * width, dtype=torch.uint8),
        "w2": torch.empty(count, held // 16, 10_240, dtype=torch.int32),
        "w2_scale": torch.empty(count, held // 32, 5120, dtype=torch.uint8),
    }
    with recorded_launches() as served:
        for rows in range(1, tokens + 1):
            for first in range(5):
                def sliced(columns, dtype):
                    return torch.empty(first + rows, columns, dtype=dtype)[first:]

                launch("mxfp4_experts_decode", x=sliced(5120, torch.bfloat16), **weights, out=sliced(5120, torch.bfloat16),
                       topk_weights=sliced(chosen, torch.float32), topk_ids=sliced(chosen, torch.int32),
                       arrived=torch.zeros(1024, dtype=torch.int32), limit=10.0,
                       expert_map=torch.empty(3 * count, dtype=torch.int32) if mapped else None)
    names = {name for name, _ in served}
    assert served == warmed and names == {"_experts_gate_up_kernel", "_experts_down_kernel"}


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_every_batch_and_context_reaches_exactly_what_was_warmed(heads):
    from vllm.ampere.integration.warmup import KERNELS

    with recorded_launches() as warmed:
        for each in LAYERS:
            for call in KERNELS.get_warmup_keys(layer(heads, *each)):
                launch(call.op, **call.inputs("cpu"))
    with recorded_launches() as served:
        for rows in range(1, 34):
            serve_attention(heads, rows, rows % 5, 1 + rows % 3)
        for rows in (48, 60, 96, 120, 200, 4097):
            serve_attention(heads, rows, 6, 16)
        for width in (1, 2, 15, 16, 100, 511, 513, 8191, 8193, 16_384, 65_537, 131_071, 200_000, 1 << 20):
            serve_index(1, 0, width)
            serve_index(7, 3, width)
            serve_index(9, 3, width)  # three rows a request
    assert served == warmed and len(served) > 15


# On a card upstream's own kernels do the work of these ops, or a warm-up of its own compiles them: `test_mhc_boundary.py`.
UPSTREAM_ON_A_CARD = {
    "_compressor_pool_kernel", "_compressor_ring_kernel", "_engram_gate_kernel", "_mhc_collapse_kernel",
    "_mhc_expand_kernel", "_mhc_finish_kernel", "_mhc_finish_long_kernel", "_mhc_post_kernel",
    "_mhc_post_project_kernel", "_mhc_project_kernel",
    "_mhc_terms_kernel", "_route_kernel", "_window_slots_kernel",
}
# The CPU engine's prefill reads the pages; the second round of `_largest_kernel` starts at 8,192 rows; few requests have
# many splits; and this engine's have three rows a step or more, which share their programs of `_paged_mqa_logits_kernel`.
NOT_ON_THE_CPU = {
    "_combine_topk_swa_kernel", "_gather_dequant_kernel", "_largest_kernel", "_merge_attn_states_kernel",
    "_paged_mqa_logits_kernel",
    "_sparse_mla_rows_kernel",
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """What an engine with drafts launches and holds: prefill in chunks, steps that mix prefill and decode, decode of
    one row and of six."""
    tmp_path = tmp_path_factory.mktemp("engine")
    prompts = [[(7 * n + i) % 100 + 3 for i in range(length)] for n, length in enumerate((1, 20, 45, 700, 3, 17))]
    options = OPTIONS | {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}}
    checkpoint = tiny_checkpoint.write(tmp_path / "parrot", "parrot")
    job = {"checkpoint": str(checkpoint), "options": options, "prompts": prompts, "max_tokens": 5}
    script = Path(__file__).with_name("served_kernels.py")
    ended = run([str(script), json.dumps(job)], tmp_path / "log", 500)
    assert ended.code == 0, ended.output[-4000:]
    return json.loads(ended.output.strip().splitlines()[-1])


def test_the_engine_reaches_nothing_else(engine):
    """The engram look-up has one binary, which upstream's first dummy request compiles."""
    served, warmed = ({tuple(k) for k in engine[name]} for name in ("served", "warmed"))
    others = sorted(name for name, _ in served - warmed if name not in UPSTREAM_ON_A_CARD)
    assert others == ["_engram_lookup_kernel"], sorted(served - warmed)
    assert {name for name, _ in warmed - served} == NOT_ON_THE_CPU


def test_drafts_are_sampled_by_our_kernel_and_no_streams_are_kept_for_them(engine):
    """Patches 0540 and 0550."""
    assert "_markov_step_kernel" in {name for name, _ in engine["served"]}
    assert engine["kept_streams"] is None


@triton.jit
def _sum_kernel(x_ptr, count):
    tl.store(x_ptr, tl.load(x_ptr) + count)


def test_a_size_that_is_specialised_would_show():
    x = torch.empty(64)
    assert len({key(_sum_kernel, x, count) for count in (1, 16, 17, 33, 48)}) == 3
    assert len({key(_sum_kernel, x[first:], 17) for first in range(8)}) == 2
