# SPDX-License-Identifier: Apache-2.0
"""The indexer scores a slice of rows at a time."""

import pytest
import torch

from .selection import select, step

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("rows_a_slice", [1, 3, 7])
def test_slices_do_not_change_the_selection(monkeypatch, rows_a_slice):
    """Bit for bit that of all rows at once; every row sees one token more than the one before it."""
    from vllm.ampere.integration import indexer

    given, seen = step(context=700, rows=17, topk=64, device="cpu"), []
    scored = indexer.paged_mqa_logits
    monkeypatch.setattr(indexer, "paged_mqa_logits", lambda q, *rest: seen.append(len(q)) or scored(q, *rest))
    want = select(*given, monkeypatch, budget_bytes=1 << 30)
    got = select(*given, monkeypatch, budget_bytes=rows_a_slice * 700 * 4)
    assert seen == [17, *[rows_a_slice] * (17 // rows_a_slice), *filter(None, [17 % rows_a_slice])]
    for mine, whole in zip(got, want):
        assert torch.equal(mine, whole)
        assert (mine >= -1).all() and len(mine.unique(dim=0)) > 1
