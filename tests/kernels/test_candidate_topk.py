# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.indexer.candidate_topk import OPS, candidate_blocks, mask_to_candidates, select_topk

INF, NAN = math.inf, math.nan
SCORE = st.sampled_from([-INF, INF, NAN, -0.0, 0.0, 1.0, -1.0, 2.5, 3.4e38])


def rank(value):
    return -INF if math.isnan(value) else value


def derived_topk(row, k):
    """By sorting Python tuples: best score first, then the lower index."""
    order = sorted((-rank(v), i) for i, v in enumerate(row) if rank(v) > -INF)
    chosen = sorted(i for _, i in order[:k])
    return chosen + [-1] * (k - len(chosen))


def derived_blocks(row, visible, blocks, size):
    best = {}
    for j, value in enumerate(row[:visible]):
        best[j // size] = max(best.get(j // size, -INF), rank(value))
    order = sorted((-value, number) for number, value in best.items() if value > -INF)
    chosen = [number for _, number in order]
    if visible > 0:
        newest = (visible - 1) // size
        chosen = [newest] + [number for number in chosen if number != newest]
    chosen = sorted(chosen[:blocks])
    return chosen + [-1] * (blocks - len(chosen))


def unpacked(scores, candidates):
    """Scores of listed blocks where their rows are, among -inf."""
    size = scores.shape[1] // candidates.shape[1]
    whole = scores.new_full((len(scores), size * (int(candidates.max()) + 2)), -INF)
    for row, listed, values in zip(whole, candidates.tolist(), scores):
        for i, block in enumerate(listed):
            if block >= 0:
                row[block * size : block * size + size] = values[i * size : i * size + size]
    return whole


@settings(deadline=None, max_examples=150)
@over(st.lists(st.lists(SCORE, min_size=13, max_size=13), min_size=1, max_size=4), st.integers(1, 17))
def test_select_topk_oracle(rows, k):
    got = select_topk(torch.tensor(rows), k)
    assert got.dtype == torch.int32 and got.tolist() == [derived_topk(row, k) for row in torch.tensor(rows).tolist()]


@settings(deadline=None, max_examples=150)
@over(st.lists(st.tuples(st.sets(st.integers(0, 11), max_size=4), st.lists(SCORE, min_size=12, max_size=12)),
               min_size=1, max_size=4), st.integers(1, 14))  # fmt: skip
def test_select_topk_of_packed_blocks_oracle(rows, k):
    """Four blocks of three rows; columns of a -1 are at -inf."""
    candidates = torch.tensor([sorted(blocks) + [-1] * (4 - len(blocks)) for blocks, _ in rows], dtype=torch.int32)
    scores = torch.tensor([values for _, values in rows])
    scores[candidates.repeat_interleave(3, 1) < 0] = -INF
    got = select_topk(scores, k, None, candidates, 3)
    assert got.dtype == torch.int32
    assert got.tolist() == [derived_topk(row, k) for row in unpacked(scores, candidates).tolist()]


@settings(deadline=None, max_examples=150)
@over(
    st.lists(st.tuples(st.lists(SCORE, min_size=21, max_size=21), st.integers(-1, 21)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 9),
)
def test_candidate_blocks_oracle(rows, blocks, size):
    scores, visible = torch.tensor([row for row, _ in rows]), torch.tensor([v for _, v in rows], dtype=torch.int32)
    got = candidate_blocks(scores, visible, blocks, size)
    want = [derived_blocks(row, max(v, 0), blocks, size) for row, v in zip(scores.tolist(), visible.tolist())]
    assert got.dtype == torch.int32 and got.tolist() == want


@settings(deadline=None, max_examples=100)
@over(st.lists(st.lists(st.integers(-2, 9), min_size=5, max_size=5), min_size=1, max_size=4), st.integers(1, 9))
def test_mask_oracle(listed, size):
    scores = torch.randn(len(listed), 21)
    got = mask_to_candidates(scores, torch.tensor(listed, dtype=torch.int32), size)
    for row, blocks in enumerate(listed):
        for j in range(21):
            assert got[row, j] == (scores[row, j] if j // size in blocks else -INF)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_cases_against_sorting(op):
    for case in op.cases:
        given = case.inputs(seed=1)
        if op.name == "select_topk":
            whole = unpacked(given["scores"], given["candidates"]) if "candidates" in given else given["scores"].clone()
            if "visible" in given:
                whole[torch.arange(whole.shape[1]) >= given["visible"][:, None]] = -INF
            assert select_topk(**given).tolist() == [derived_topk(row, given["k"]) for row in whole.tolist()]
        elif op.name == "candidate_blocks":
            rows = zip(given["scores"].tolist(), given["visible"].tolist())
            want = [derived_blocks(row, visible, given["blocks"], 8) for row, visible in rows]
            assert candidate_blocks(**given).tolist() == want
        else:
            kept = mask_to_candidates(**given) == given["scores"]
            blocks = [{b for b in row if b >= 0} for row in given["candidates"].tolist()]
            assert kept.tolist() == [[j // 8 in row for j in range(kept.shape[1])] for row in blocks]


@pytest.mark.parametrize("fill", [NAN, -INF, INF])
def test_rows_of_one_value_stay_in_range(fill):
    scores = torch.full((3, 100), fill)
    got = select_topk(scores, 16)
    assert (got >= -1).all() and (got < 100).all()
    assert (got == -1).all() == (fill != INF)
    blocks = candidate_blocks(scores, torch.tensor([100, 41, 0], dtype=torch.int32), 4, 8)
    assert 12 in blocks[0] and 5 in blocks[1] and (blocks[2] == -1).all()
    assert (blocks < 13).all()


def test_the_newest_block_is_forced_in_against_better_ones():
    scores = torch.arange(80.0, 0.0, -1).repeat(1, 1)
    scores[0, :24] = INF
    got = candidate_blocks(scores, torch.tensor([75], dtype=torch.int32), 2, 8)
    assert got.tolist() == [[0, 9]]


def test_scores_behind_the_visible_rows_are_not_read():
    scores = torch.randn(1, 64)
    visible = torch.tensor([20], dtype=torch.int32)
    clean, rows = candidate_blocks(scores, visible, 3, 8), select_topk(scores, 7, visible)
    assert rows.max() < 20 and (rows >= 0).all() and (select_topk(scores, 7, -visible) == -1).all()
    packed, listed = scores[:, 8:48].clone(), torch.tensor([[1, 2, 9, -1, -1]], dtype=torch.int32)
    packed[0, 12:] = -INF
    inside = select_topk(packed, 7, visible, listed, 8)
    for poison in (NAN, INF):
        scores[0, 20:] = poison
        packed[0, 24:] = poison  # no more than three blocks are seen
        assert torch.equal(candidate_blocks(scores, visible, 3, 8), clean)
        assert torch.equal(select_topk(scores, 7, visible), rows)
        assert torch.equal(select_topk(packed, 7, visible, listed, 8), inside)


def test_the_selection_is_the_whole_set_when_it_fits():
    scores = torch.randn(2, 30).masked_fill(torch.arange(30) >= torch.tensor([[17], [30]]), -INF)
    assert select_topk(scores, 32).tolist() == [list(range(17)) + [-1] * 15, list(range(30)) + [-1] * 2]


def test_no_columns():
    empty = torch.empty(2, 0)
    assert (select_topk(empty, 3) == -1).all()
    assert (candidate_blocks(empty, torch.zeros(2, dtype=torch.int32), 3, 8) == -1).all()
    assert mask_to_candidates(empty, torch.zeros(2, 3, dtype=torch.int32), 8).shape == (2, 0)


def test_the_input_keeps_its_bits():
    scores = torch.randn(3, 40)
    scores[0, 3] = NAN
    before = scores.clone()
    candidate_blocks(scores, torch.full((3,), 40, dtype=torch.int32), 2, 8)
    mask_to_candidates(scores, torch.zeros(3, 1, dtype=torch.int32), 8)
    select_topk(scores, 4)
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("call, message", [
    (lambda s, v: select_topk(s.double(), 4), "scores is float64"),
    (lambda s, v: select_topk(s, 0), "k is 0, must be at least 1"),
    (lambda s, v: select_topk(s, 4, v[:1]), "visible has 1 on axis T, must be 2"),
    (lambda s, v: select_topk(s, 4, v, v[:, None], 8), "scores has 9 columns, must be 1 x 8"),
    (lambda s, v: select_topk(s, 4, v, v[:, None].long(), 9), "candidates is int64"),
    (lambda s, v: select_topk(s, 4, v, v[:, None], 0), "block_size is 0, must be at least 1"),
    (lambda s, v: candidate_blocks(s, v.long(), 4, 8), "visible is int64"),
    (lambda s, v: candidate_blocks(s, v[:1], 4, 8), "visible has 1 on axis T, must be 2"),
    (lambda s, v: candidate_blocks(s, v, 4, 0), "block_size is 0"),
    (lambda s, v: mask_to_candidates(s, v, 8), r"candidates has shape \[2\]"),
])
def test_contract(call, message):
    with pytest.raises(ContractError, match=message):
        call(torch.zeros(2, 9), torch.zeros(2, dtype=torch.int32))
