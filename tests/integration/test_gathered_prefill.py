# SPDX-License-Identifier: Apache-2.0
"""Prefill over gathered rows against prefill over the pages, on a step's metadata as upstream builds it."""

import types

import pytest
import torch

from vllm.ampere.kernels.attention.sparse_mla_decode import TOLERANCE
from vllm.ampere.kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from vllm.ampere.kernels.attention.topk_slots import topk_slots
from vllm.ampere.kernels.attention.window_slots import window_slots
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.inputs import kv_pages, normal

pytestmark = pytest.mark.vllm
HEADS, WINDOW, TOPK, PAGE, LONGEST, BATCH = 4, 16, 12, 8, 160, 200
# Tokens of each sequence, and how many of them this step runs; the first request decodes.
SEQUENCES, QUERIES = (40, 90, 7, 33, 160, 150), (1, 60, 7, 1, 30, 20)


def table(generator, rows: int) -> torch.Tensor:
    """Pages of each request, none shared, page 0 unused."""
    width = -(-rows // PAGE)
    return 1 + torch.randperm(len(SEQUENCES) * width, generator=generator).view(-1, width).int()


def step(ratio: int, replay_start=None):
    """A layer, its metadata, and the step's queries and positions."""
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

    generator = torch.Generator().manual_seed(ratio)
    seq_lens, queries = torch.tensor(SEQUENCES, dtype=torch.int32), torch.tensor(QUERIES)
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
    request = torch.arange(len(QUERIES)).repeat_interleave(queries).int()
    positions = torch.cat([torch.arange(s - q, s) for s, q in zip(SEQUENCES, QUERIES)])
    tables = table(generator, LONGEST), table(generator, LONGEST // ratio if ratio else 1)
    caches = [kv_pages(generator, 1 + pages.numel(), PAGE) for pages in tables]
    first = torch.zeros(len(QUERIES), dtype=torch.int32) if replay_start is None else replay_start
    slots, lens = window_slots(positions, request, tables[0], first, WINDOW, PAGE)
    before = (seq_lens - queries - first).clamp(0, WINDOW - 1).int()
    window = DeepseekSparseSWAMetadata(
        block_table=tables[0], slot_mapping=None, block_size=PAGE, query_start_loc=starts, query_start_loc_cpu=starts,
        num_decodes=1, num_prefills=len(QUERIES) - 1, num_decode_tokens=1, num_prefill_tokens=len(positions) - 1,
        prefill_seq_lens=seq_lens[1:], prefill_seq_lens_cpu=seq_lens[1:],
        prefill_gather_lens=(queries.int() + before)[1:], prefill_query_lens_cpu=queries[1:].int(),
        prefill_window_size=WINDOW, prefill_max_model_len=LONGEST, prefill_max_num_batched_tokens=BATCH,
    )
    visible = (positions + 1) // max(ratio, 1)
    order = torch.rand(len(positions), LONGEST, generator=generator)
    order[torch.arange(LONGEST) >= visible[:, None]] = 2
    chosen = order.argsort(1)[:, :TOPK].int()
    chosen[torch.arange(TOPK) >= visible[:, None]] = -1
    chosen[torch.rand(chosen.shape, generator=generator) < 0.1] = -1
    layer = types.SimpleNamespace(
        compress_ratio=ratio, window_size=WINDOW, max_model_len=LONGEST, max_num_batched_tokens=BATCH,
        topk_indices_buffer=chosen, attn_sink=normal(generator, HEADS, dtype=torch.float32), scale=512**-0.5,
        swa_cache_layer=types.SimpleNamespace(kv_cache=caches[0]), _compressed_kv_cache=lambda: caches[1],
    )
    q = normal(generator, len(positions), HEADS, 512, scale=2.0)
    compressed = types.SimpleNamespace(block_table=tables[1])
    return layer, window, compressed, q, (slots, lens), (request, positions)


def over_pages(layer, q, lists, tokens, compressed):
    if not layer.compress_ratio:
        return sparse_mla_prefill(q, layer.attn_sink, layer.scale, layer.swa_cache_layer.kv_cache, *lists)
    request, positions = tokens
    cache = layer._compressed_kv_cache()
    selected = topk_slots(layer.topk_indices_buffer, request, compressed.block_table, positions, layer.compress_ratio, PAGE)
    return sparse_mla_prefill(q, layer.attn_sink, layer.scale, layer.swa_cache_layer.kv_cache, *lists, cache, *selected)


@pytest.fixture
def workspace(monkeypatch):
    """vLLM's, filled with NaN and locked once what the longest request calls for is reserved."""
    from vllm.v1.worker import workspace

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # it wants an accelerator
    workspace.reset_workspace_manager()
    workspace.init_workspace_manager(torch.device("cpu"))
    yield workspace
    workspace.reset_workspace_manager()


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_gathered_rows_give_what_the_pages_give(workspace, ratio, replayed):
    from vllm.ampere.integration import prefill

    first = torch.tensor([0, 25, 0, 20, 0, 128], dtype=torch.int32) if replayed else None
    layer, window, compressed, q, lists, tokens = step(ratio, first)
    prefill.reserve(layer)
    for whole in workspace.current_workspace_manager()._current_workspaces:
        whole.fill_(0xFF)
    workspace.lock_workspace()
    assert len(window.get_prefill_chunk_plan(ratio, 1, has_compressed=ratio > 0)) > 1
    output = torch.full_like(q, torch.nan)
    prefill.attend(layer, window, compressed, q[1:], output[1:])
    want = over_pages(layer, q, lists, tokens, compressed)
    assert want.any() and output[0].isnan().all()
    assert_close(output[1:], want[1:], TOLERANCE, f"ratio {ratio}")


def test_a_captured_step_reads_the_pages(monkeypatch):
    from vllm.ampere.integration import prefill

    on_a_card = types.SimpleNamespace(is_cuda=True)
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        assert prefill.gathers(on_a_card) is not capturing
    assert not prefill.gathers(torch.empty(1))
