# SPDX-License-Identifier: Apache-2.0
"""A prefill chunk at a context of 1,048,576 tokens: what the scores take of the card's memory."""

import importlib.util

import pytest
import torch

from tests.integration.selection import select, step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not importlib.util.find_spec("vllm.v1"), reason="vLLM is not installed in this Python")]
CONTEXT, ROWS = 1 << 20, 640


def test_transients_stay_within_the_budget(monkeypatch):
    """2.7 GB of scores in all; at most 1.5 budgets at a time (a slice, and what its selection keeps), the same selection."""
    from vllm.ampere.integration.indexer import SCORE_BUDGET_BYTES

    given = step(CONTEXT, ROWS, topk=512, device="cuda")
    whole = select(*given, monkeypatch, budget_bytes=ROWS * CONTEXT * 4)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sliced = select(*given, monkeypatch, budget_bytes=SCORE_BUDGET_BYTES)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    assert SCORE_BUDGET_BYTES // 2 < taken <= 1.5 * SCORE_BUDGET_BYTES, taken
    assert all(torch.equal(a, b) for a, b in zip(sliced, whole))


def test_inside_candidates_transients_do_not_follow_the_context(monkeypatch):
    """64 KiB of scores a row, however long the context: 40 MiB in all, and what their selection keeps."""
    from vllm.ampere.integration.indexer import SCORE_BUDGET_BYTES

    taken = {}
    for context in (1 << 15, CONTEXT):
        given = step(context, ROWS, topk=512, device="cuda", write=False, blocks=2048)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        select(*given, monkeypatch, budget_bytes=SCORE_BUDGET_BYTES)
        torch.cuda.synchronize()
        taken[context] = torch.cuda.max_memory_allocated() - before
    assert ROWS << 16 <= min(taken.values()) and max(taken.values()) <= 1.5 * (ROWS << 16), taken
    # The allocator hands out blocks of up to 1 MiB more than asked; what followed the context would be 2.5 GiB.
    assert abs(taken[CONTEXT] - taken[1 << 15]) < 4 << 20, taken
