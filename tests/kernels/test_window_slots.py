# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.attention.window_slots import OP, window_slots


def oracle(positions, request, block_table, first, window, page_rows, ahead=None):
    """Every position of the sequence is asked whether it is in the window."""
    slots = torch.full((len(positions), window), -1, dtype=torch.int32)
    lens = torch.zeros(len(positions), dtype=torch.int32)
    for token, (position, owner) in enumerate(zip(positions.tolist(), request.tolist())):
        last = position + (0 if ahead is None else int(ahead[token]))
        seen = [p for p in range(last + 1) if owner >= 0 and last - p < window and p >= int(first[owner])]
        for column, p in enumerate(seen):
            slots[token, column] = int(block_table[owner, p // page_rows]) * page_rows + p % page_rows
        lens[token] = len(seen)
    return slots, lens


def check(**arguments):
    for got, want in zip(window_slots(**arguments), oracle(**arguments)):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    check(**case.inputs(seed=41))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 90), st.integers(0, 4)), max_size=6),
    st.tuples(st.integers(0, 95), st.integers(0, 95)),
    st.integers(1, 40),
    st.sampled_from([1, 16, 32, 64]),
    st.booleans(),
)
def test_any_window(tokens, first, window, page_rows, causal):
    check(
        positions=torch.tensor([t[1] for t in tokens], dtype=torch.int64),
        request=torch.tensor([t[0] for t in tokens], dtype=torch.int32),
        block_table=torch.arange(1, 191, dtype=torch.int32).view(2, 95).flip(0),
        first=torch.tensor(first, dtype=torch.int32),
        window=window,
        page_rows=page_rows,
        ahead=None if causal else torch.tensor([t[2] for t in tokens], dtype=torch.int32),
    )


@pytest.mark.parametrize("before, block", [(0, 5), (3, 5), (127, 5), (128, 1), (300, 6)])
def test_a_draft_block_lists_its_window_and_itself(before, block):
    """Every token of a block of n lists the same rows: the 128 before the block, then all n."""
    positions = torch.arange(before, before + block)
    slots, lens = window_slots(
        positions, torch.zeros(block, dtype=torch.int32), torch.arange(1, 21, dtype=torch.int32).view(1, 20),
        torch.zeros(1, dtype=torch.int32), 128 + block, 32, (positions[-1] - positions).int(),
    )  # fmt: skip
    want = [32 + p for p in range(max(before - 128, 0), before + block)]
    assert lens.tolist() == [len(want)] * block
    assert all(row[: len(want)] == want for row in slots.tolist())


@pytest.mark.parametrize("change", [{"window": 0}, {"page_rows": 0}])
def test_sizes_below_one_are_refused(change):
    with pytest.raises(ContractError, match="both must be at least 1"):
        window_slots(**(OP.cases[1].inputs() | change))
