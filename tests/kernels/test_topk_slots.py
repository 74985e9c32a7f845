# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.attention.topk_slots import OP, topk_slots


def oracle(topk, request, block_table, positions, ratio, page_rows):
    """Entry by entry, in Python."""
    slots, lens = [], []
    for row, owner, position in zip(topk.tolist(), request.tolist(), positions.tolist()):
        valid = [owner >= 0 and 0 <= r < (position + 1) // ratio for r in row]
        slots.append(
            [
                int(block_table[owner, r // page_rows]) * page_rows + r % page_rows if v else -1
                for r, v in zip(row, valid)
            ]
        )
        lens.append(max([i + 1 for i, v in enumerate(valid) if v], default=0))
    return torch.tensor(slots, dtype=torch.int32).view(topk.shape), torch.tensor(lens, dtype=torch.int32)


def check(**arguments):
    for got, want in zip(topk_slots(**arguments), oracle(**arguments)):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    check(**case.inputs(seed=31))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1, 1), st.integers(0, 70), st.lists(st.integers(-3, 80), min_size=5, max_size=5)),
        max_size=6,
    ),
    st.integers(1, 3),
    st.sampled_from([1, 32, 64, 128]),
)
def test_any_list(tokens, ratio, page_rows):
    check(
        topk=torch.tensor([t[2] for t in tokens], dtype=torch.int32).view(-1, 5),
        request=torch.tensor([t[0] for t in tokens], dtype=torch.int32),
        block_table=torch.arange(1, 163, dtype=torch.int32).view(2, 81).flip(0),
        positions=torch.tensor([t[1] for t in tokens], dtype=torch.int64),
        ratio=ratio,
        page_rows=page_rows,
    )


def test_pages_of_dropped_entries_are_not_looked_up():
    """A table as wide as the visible rows need: entries beyond it would raise."""
    topk = torch.tensor([[0, 5000, -1, 31, 2**31 - 1]], dtype=torch.int32)
    slots, lens = topk_slots(
        topk, torch.tensor([0], dtype=torch.int32), torch.tensor([[7]], dtype=torch.int32), torch.tensor([63]), 2, 32
    )
    assert slots.tolist() == [[7 * 32, -1, -1, 7 * 32 + 31, -1]] and lens.tolist() == [4]


@pytest.mark.parametrize("change", [{"ratio": 0}, {"page_rows": 0}])
def test_sizes_below_one_are_refused(change):
    with pytest.raises(ContractError, match="both must be at least 1"):
        topk_slots(**(OP.cases[1].inputs() | change))
