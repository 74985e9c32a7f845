# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.engram.engram_gate import OP, engram_gate
from vllm.ampere.testing.compare import assert_close


def derived(given, t):
    """One token in float64: a cosine-like product of each stream with its key, then the signed root."""
    dim = given["streams"].shape[-1]
    row = given["kv"][t].double().split(dim)
    out = []
    for j in range(4):
        x, key = given["streams"][t, j].double(), row[j]
        q, k = given["q_weight"][j].double(), given["k_weight"][j].double()
        x_hat, key_hat = x / torch.sqrt(x @ x / dim + given["eps"]), key / torch.sqrt(key @ key / dim + given["eps"])
        d = float((x_hat * q) @ (key_hat * k)) / math.sqrt(dim)
        gate = 1 / (1 + math.exp(-math.copysign(math.sqrt(max(abs(d), given["clamp"])), d)))
        live = given["live"] is None or bool(given["live"][t])
        out.append(x + (gate if live else 0.0) * row[4])
    return torch.stack(out)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    got = engram_gate(**given)
    for t in range(0, got.shape[0], 7):
        assert_close(got[t], derived(given, t), OP.tolerances["streams"], f"token {t}")


def test_the_gate_differs_from_half_everywhere():
    """Negative control: a gate stuck at sigmoid(0) is far outside the tolerance."""
    given = OP.cases[3].inputs(seed=2)
    stuck = given["streams"].double() + 0.5 * given["kv"][:, None, 4 * 96 :].double()
    with pytest.raises(AssertionError, match="relative norm"):
        assert_close(engram_gate(**given), stuck, OP.tolerances["streams"])


def test_tokens_that_are_not_live_keep_their_bits():
    given = OP.cases[2].inputs(seed=3)
    got = engram_gate(**given)
    same = (got == given["streams"]).flatten(1).all(1)
    assert torch.equal(same, ~given["live"]) and given["live"].any() and not given["live"].all()


@pytest.mark.parametrize("d, argument", [(0.0, 1e-3), (1.0, 1.0), (-4.0, -2.0)])
def test_gate_values_at_given_products(d, argument):
    """d is set through the weights of one dimension; 16 dimensions of ones have rms 1."""
    gate = 1 / (1 + math.exp(-argument))
    weight = torch.zeros(4, 16, dtype=torch.bfloat16)
    weight[:, 0] = abs(d) ** 0.5 * 2
    k = weight * (math.copysign(1, d))
    ones = torch.ones(1, 4, 16, dtype=torch.bfloat16)
    kv = torch.ones(1, 80, dtype=torch.bfloat16)
    kv[:, 64:] = 256.0
    got = engram_gate(ones, kv, weight, k, None, 1e-20)
    assert got.float().flatten().tolist() == pytest.approx([1 + gate * 256] * 64, rel=2**-8)


def test_zero_streams_and_zero_keys_stay_finite():
    given = OP.cases[3].inputs(seed=4)
    given["streams"][0] = 0
    given["kv"][1] = 0
    got = engram_gate(**given)
    assert torch.isfinite(got).all() and torch.equal(got[1], given["streams"][1])


def test_same_bits_alone_and_in_a_batch():
    given = OP.cases[2].inputs(seed=5)
    whole = engram_gate(**given)
    for t in (0, 13, 64):
        alone = engram_gate(**given | {n: given[n][t : t + 1] for n in ("streams", "kv", "live")})
        assert torch.equal(alone[0], whole[t])


@pytest.mark.parametrize("change, message", [
    ({"kv": lambda x: x[:, :-1]}, "kv has 1279 on axis 5[*]D"),
    ({"q_weight": lambda x: x[:3]}, "q_weight has 3 on axis 4"),
    ({"live": lambda x: x.int()}, "live is int32, must be bool"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        engram_gate(**given)
