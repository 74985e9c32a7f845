# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.attention.inverse_rope import OP, inverse_rope


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle_complex_multiplication(case):
    """Against e^{-j angle} in complex128, which shares no code with the reference."""
    given = case.inputs(seed=1)
    got = inverse_rope(**given)
    tail = torch.view_as_complex(given["o"][..., 448:].double().unflatten(-1, (32, 2)).contiguous())
    table = given["cos_sin"][given["positions"]].double()
    turned = torch.view_as_real(tail * torch.complex(table[:, :32], -table[:, 32:])[:, None]).flatten(-2)
    assert torch.equal(got[..., :448], given["o"][..., :448])
    assert ((got[..., 448:].double() - turned).abs() <= turned.abs() * 2**-8 + 1e-6).all()


def test_rows_do_not_depend_on_their_batch():
    given = OP.cases[-1].inputs(seed=2)
    whole = inverse_rope(**given)
    one = inverse_rope(given["o"][7:8], given["positions"][7:8], given["cos_sin"])
    assert torch.equal(whole[7:8], one)


@pytest.mark.parametrize("change, message", [
    ({"o": lambda x: x.float()}, "o is float32, must be bfloat16"),
    ({"positions": lambda x: x[:-1]}, "positions has 128 on axis T, must be 129"),
    ({"o": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension of o must be contiguous"),
])
def test_contract(change, message):
    given = OP.cases[-1].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        inverse_rope(**given)
