# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.attention.combine_topk_swa import OP, combine_topk_swa


def oracle(topk_rows, query_start, seq_lens, gather_lens, window, ratio, topk, request_rows, compressed_rows):
    """Request by request, token by token, appending to a list."""
    width = (topk + window + 127) // 128 * 128
    indices, lens = [], []
    for request, (seq_len, gathered) in enumerate(zip(seq_lens.tolist(), gather_lens.tolist())):
        start, end = (int(query_start[request + i] - query_start[0]) for i in (0, 1))
        for token in range(start, end):
            position = seq_len - (end - token)
            visible = min((position + 1) // ratio, topk) if ratio else 0
            chosen = topk_rows[token, :visible].tolist()
            row = [request * request_rows + r if 0 <= r < compressed_rows else -1 for r in chosen]
            for p in range(seq_len - gathered, seq_len):
                if position - window < p <= position:
                    row.append(request * request_rows + compressed_rows + p - (seq_len - gathered))
            indices.append(row + [-1] * (width - len(row)))
            lens.append(len(row))
    return torch.tensor(indices, dtype=torch.int32).view(-1, width), torch.tensor(lens, dtype=torch.int32)


def same(got, want):
    return all(g.dtype == w.dtype and torch.equal(g, w) for g, w in zip(got, want))


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
@pytest.mark.parametrize("seed", range(4))
def test_oracle(case, seed):
    given = case.inputs(seed=61 + seed)
    assert same(combine_topk_swa(**given), oracle(**given))


def test_given_results_are_filled_to_the_tail():
    given = next(c for c in OP.cases if c.name == "mixed_r1").inputs(seed=62)
    want = combine_topk_swa(**given)
    out = tuple(torch.full_like(t, 12345) for t in want)
    got = combine_topk_swa(**given, out=out)
    assert all(g.data_ptr() == o.data_ptr() for g, o in zip(got, out)) and same(out, want)


def test_requests_never_name_rows_of_each_other():
    given = next(c for c in OP.cases if c.name == "mixed_r2").inputs(seed=63)
    indices, lens = combine_topk_swa(**given)
    token = 0
    for request, length in enumerate((5, 1, 40)):
        rows = indices[token : token + length]
        rows = rows[rows >= 0]
        assert (rows // given["request_rows"] == request).all() and len(rows)
        token += length
    assert (lens <= indices.shape[1]).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk": 65}, r"topk is 65, must be in \[0, 64\]"),
        ({"window": 0}, "window is 0 and ratio 1, must be at least 1 and 0"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, "query_start has 2 entries, must be 5"),
    ],
)
def test_contract(change, message):
    given = next(c for c in OP.cases if c.name == "mixed_r1").inputs()
    with pytest.raises(ContractError, match=message):
        combine_topk_swa(**(given | change))
