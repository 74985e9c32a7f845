# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.moe.clamped_swiglu import OP, clamped_swiglu
from vllm.ampere.testing.compare import assert_close


def derived(given):
    """Element by element, in Python's floats."""
    want, limit = given["out"].double(), given["limit"]
    for row, values in enumerate(given["gate_up"].tolist()):
        if given["expert_map"] is not None and given["expert_map"][given["topk_ids"][row]] < 0:
            continue
        pairs = list(zip(values[::2], values[1::2]))
        clamped = [(min(gate, limit), max(-limit, min(up, limit))) for gate, up in pairs]
        row_values = [gate / (1 + math.exp(-gate)) * up for gate, up in clamped]
        want[row] = torch.tensor(row_values + [0.0] * (want.shape[1] - len(pairs)), dtype=torch.float64)
    return want


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    want = derived(given)
    clamped_swiglu(**given)
    assert_close(given["out"], want, OP.tolerances["out"])


def test_clamps_on_every_side():
    rows = torch.tensor([[50.0, 50, -50, -50, 50, -50, 1, 3]]).bfloat16()
    out = torch.full((1, 4), torch.nan, dtype=torch.bfloat16)
    clamped_swiglu(rows, out, 10.0)
    assert out[0, 0] == 100 and abs(out[0, 1]) < 1e-18 and out[0, 2] == -100 and out[0, 3] == 2.1875
    unbounded = torch.empty_like(out)
    clamped_swiglu(rows, unbounded, math.inf)
    assert unbounded[0, 0] == 2496  # 2,500, whose neighbours are 16 apart
    assert unbounded[0, 3] == out[0, 3]


def test_nan_stays_in_its_element_and_padding_is_zero():
    given = OP.cases[1].inputs(seed=2)
    given["gate_up"][2, 10], given["gate_up"][3, 21] = torch.nan, torch.nan
    clamped_swiglu(**given)
    assert given["out"].isnan().nonzero().tolist() == [[2, 5], [3, 10]]
    assert not given["out"][:, 288:].any() and given["out"].shape[1] == 320


@pytest.mark.parametrize("change, message", [
    ({"out": lambda t: t[:, :280].contiguous()}, "out has 280 columns, must be at least 288"),
    ({"out": lambda t: t[:, ::2]}, "out must be contiguous"),
    ({"gate_up": lambda t: t[:, :-1].contiguous()}, "gate_up has 575 on axis 2[*]I, must be a multiple of 2"),
    ({"gate_up": lambda t: t.float()}, "gate_up is float32, must be bfloat16"),
    ({"topk_ids": lambda t: torch.zeros(6, dtype=torch.int32)}, "must be given together"),
])
def test_contract(change, message):
    given = OP.cases[1].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        clamped_swiglu(**given)
