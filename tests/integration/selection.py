# SPDX-License-Identifier: Apache-2.0
"""One step of the indexer without an engine: a layer and metadata with what `AmpereSparseAttnIndexer` reads of them."""

from types import SimpleNamespace

import torch

from vllm.ampere.cache_layout import INDEX_DIM, INDEX_KEY
from vllm.ampere.testing.inputs import ascending_lists

PREFIX, PAGE = "layers.4.attn.indexer.k_cache", 128


def step(context: int, rows: int, topk: int, device: str, seed: int = 0, write: bool = True, blocks: int = 32):
    """A request of `context` tokens whose last `rows` tokens are this step's: layer, metadata, queries and weights.

    Keys are random codes under scale 1; the block table is a random order of the pages. The layer lists `blocks`
    candidates, or, without `write`, selects among as many of another's, drawn at random.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = -(-context // PAGE)
    cache = torch.zeros(pages, PAGE * INDEX_KEY.row_bytes, dtype=torch.uint8)
    cache[:, : PAGE * INDEX_DIM] = torch.randint(0, 0x70, (pages, PAGE * INDEX_DIM), generator=generator, dtype=torch.uint8)
    cache[:, PAGE * INDEX_DIM :] = torch.ones(pages, PAGE).view(torch.uint8)
    layer = SimpleNamespace(
        k_cache=SimpleNamespace(prefix=PREFIX, kv_cache=cache.to(device).view(pages, PAGE, INDEX_KEY.row_bytes)), compress_ratio=1,
        topk_indices_buffer=torch.full((rows, topk), -7, dtype=torch.int32, device=device), candidate_write=write,
        candidate_blocks=torch.full((rows, blocks), -7, dtype=torch.int32, device=device), candidate_block_size=8,
    )
    if not write:
        counts = torch.full((rows,), blocks)
        layer.candidate_blocks = ascending_lists(generator, counts, -(-context // 8), blocks).to(device)
    table = torch.randperm(pages, generator=generator).int()[None].to(device)
    metadata = {
        PREFIX: SimpleNamespace(num_decode_tokens=0, num_prefill_tokens=rows, max_seq_len=context,
                                seq_lens=torch.tensor([context], dtype=torch.int32, device=device)),
        PREFIX.removesuffix(".indexer.k_cache"): SimpleNamespace(
            req_id_per_token=torch.zeros(rows, dtype=torch.int32, device=device), block_table=table,
            query_start_loc=torch.tensor([0, rows], dtype=torch.int32, device=device)),
    }
    q = torch.randn(rows, 32, INDEX_DIM, generator=generator).to(device).to(torch.float8_e4m3fn)
    return layer, metadata, q, torch.rand(rows, 32, generator=generator).to(device)


def select(layer, metadata, q, weights, monkeypatch, budget_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the step publishes with that budget of scores: selected rows and candidate blocks."""
    from vllm.ampere.integration import indexer

    monkeypatch.setattr(indexer, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
    monkeypatch.setattr(indexer, "SCORE_BUDGET_BYTES", budget_bytes)
    ours = indexer.AmpereSparseAttnIndexer
    for name in ("_select_rows", "_select_listed_rows"):
        setattr(layer, name, getattr(ours, name).__get__(layer))
    ours._select(layer, None, q, None, weights)
    return layer.topk_indices_buffer.clone(), layer.candidate_blocks.clone()
