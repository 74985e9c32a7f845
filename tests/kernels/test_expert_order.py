# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.moe.expert_order import OP, expert_order


def derived(order, ids, experts, padded, block_size, expert_map=None, **_):
    """Python lists: the routes of each run of blocks sorted, whatever lies behind them untouched."""
    order, flat = order.tolist(), ids.flatten().tolist()
    for at in range(0, int(padded), block_size):
        expert = int(experts[at // block_size])
        if at and int(experts[at // block_size - 1]) == expert:
            continue
        mine = [r for r, e in enumerate(flat) if e >= 0 and (int(expert_map[e]) if expert_map is not None else e) == expert]
        assert sorted(order[at : at + len(mine)]) == mine
        order[at : at + len(mine)] = mine
    return order


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    want, before = derived(**given), given["order"].clone()
    expert_order(**given)
    assert given["order"].tolist() == want
    assert sorted(given["order"].tolist()) == sorted(before.tolist())


def test_whatever_order_it_finds():
    """Two sorts that differ within the experts end alike, and the second run changes nothing."""
    given, other = OP.cases[-1].inputs(seed=2), OP.cases[-1].inputs(seed=2)
    shuffled, first = other["order"], 0
    for expert in range(other["count"]):
        size = int((other["ids"] == expert).sum())
        shuffled[first : first + size] = shuffled[first : first + size].flip(0)
        first += -(-size // other["block_size"]) * other["block_size"]
    assert not torch.equal(given["order"], shuffled)
    expert_order(**given)
    expert_order(**other)
    assert torch.equal(given["order"], shuffled)
    expert_order(**other)
    assert torch.equal(given["order"], shuffled)


@pytest.mark.parametrize("wrong", [{"block_size": 0}, {"count": 0}, {"ids": torch.zeros(3, 2)}, {"padded": torch.zeros(2, dtype=torch.int32)}])
def test_refuses(wrong):
    with pytest.raises(ContractError, match="expert_order"):
        expert_order(**OP.cases[1].inputs() | wrong)
