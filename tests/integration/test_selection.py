# SPDX-License-Identifier: Apache-2.0
"""The indexer scores a slice of rows at a time, and inside a list of candidates the listed rows alone."""

import pytest
import torch

from vllm.ampere.kernels.indexer.candidate_topk import mask_to_candidates, select_topk
from vllm.ampere.kernels.indexer.paged_mqa_logits import paged_mqa_logits

from .selection import PREFIX, select, step

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("rows_a_slice", [1, 3, 7])
def test_slices_do_not_change_the_selection(monkeypatch, rows_a_slice):
    """Bit for bit that of all rows at once; every row sees one token more than the one before it."""
    from vllm.ampere.integration import indexer

    given, seen = step(context=700, rows=17, topk=64, device="cpu"), []
    scored = indexer.paged_mqa_logits

    def score(q, *rest, **named):
        seen.append(len(q))
        return scored(q, *rest, **named)

    monkeypatch.setattr(indexer, "paged_mqa_logits", score)
    want = select(*given, monkeypatch, budget_bytes=1 << 30)
    got = select(*given, monkeypatch, budget_bytes=rows_a_slice * 700 * 4)
    assert seen == [17, *[rows_a_slice] * (17 // rows_a_slice), *filter(None, [17 % rows_a_slice])]
    for mine, whole in zip(got, want):
        assert torch.equal(mine, whole)
        assert (mine >= -1).all() and len(mine.unique(dim=0)) > 1


@pytest.mark.parametrize("blocks", [1, 20, 88, 100])
def test_inside_candidates_the_selection_is_that_of_masked_scores(monkeypatch, blocks):
    """Bit for bit, in slices of any size; a list may hold all blocks of the context, and more."""
    context, rows, topk = 700, 9, 64
    given = step(context, rows, topk, "cpu", write=False, blocks=blocks)
    layer, metadata, q, weights = given
    table = metadata[PREFIX.removesuffix(".indexer.k_cache")].block_table
    visible = torch.arange(context - rows + 1, context + 1, dtype=torch.int32)
    scores = paged_mqa_logits(q, weights, layer.k_cache.kv_cache, table, torch.zeros_like(visible), visible, context)
    want = select_topk(mask_to_candidates(scores, layer.candidate_blocks, 8), topk)
    listed = layer.candidate_blocks.clone()
    for rows_a_slice in (1, 4, rows):
        got, kept = select(*given, monkeypatch, budget_bytes=rows_a_slice * blocks * 8 * 4)
        assert torch.equal(got, want) and torch.equal(kept, listed)
        assert (got >= 0).any()


@pytest.mark.parametrize("context", [200, 700, 5000, 40_000])
def test_scores_inside_candidates_do_not_grow_with_the_context(monkeypatch, context):
    """At most the listed rows are scored and selected from, of three tokens in one slice of their scores' size."""
    from vllm.ampere.integration import indexer

    given, seen = step(context, rows=3, topk=16, device="cpu", write=False, blocks=64), []
    scored, chosen = indexer.candidate_mqa_logits, indexer.select_topk

    def score(*arguments):
        seen.append(scored(*arguments))
        return seen[-1]

    def choose(scores, *rest):
        assert scores is seen[-1]
        return chosen(scores, *rest)

    monkeypatch.setattr(indexer, "candidate_mqa_logits", score)
    monkeypatch.setattr(indexer, "select_topk", choose)
    monkeypatch.setattr(indexer, "paged_mqa_logits", None)
    select(*given, monkeypatch, budget_bytes=3 * 64 * 8 * 4)
    assert [scores.shape for scores in seen] == [(3, min(64 * 8, context))]
