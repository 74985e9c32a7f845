# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.indexer.query_rope_quant import OP, query_rope_quant


def derived(q, position, cos_sin):
    """Scale and values to encode of one head: Python floats and math.frexp, no torch arithmetic."""
    q, table = q.double().tolist(), cos_sin[position].double().tolist()
    for i in range(32):
        turned = complex(q[64 + 2 * i], q[65 + 2 * i]) * complex(table[i], table[32 + i])
        q[64 + 2 * i], q[65 + 2 * i] = turned.real, turned.imag
    q = torch.tensor(q, dtype=torch.float64).bfloat16().double().tolist()
    amax = max(1e-4, *(abs(v) for v in q))
    mantissa, exponent = math.frexp(amax / 448)
    return math.ldexp(1.0, exponent - (mantissa == 0.5)), q


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    codes, weights = query_rope_quant(**given)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == given["q"].shape
    for t in range(0, codes.shape[0], 16):
        for h in range(codes.shape[1]):
            scale, values = derived(given["q"][t, h], given["positions"][t], given["cos_sin"])
            got = codes[t, h].double() * scale
            # Half a step of E4M3 (2^-4 relative, 2^-10 absolute before the scale), and one bfloat16 step where
            # float32 and float64 rotations round apart.
            for value, stored in zip(values, got.tolist()):
                assert abs(stored - value) <= abs(value) * (2**-4 + 2**-8) + scale * 2**-10
            want = given["weights"][t, h].double() * scale * given["softmax_scale"] * given["head_scale"]
            assert abs(weights[t, h].double() - want) <= abs(want) * 1e-6


def test_largest_value_uses_the_upper_half_of_the_codes():
    codes, _ = query_rope_quant(**OP.cases[-1].inputs(seed=2))
    largest = codes.float().abs().amax(-1)
    assert (largest <= 448).all() and (largest >= 224 * (1 - 2**-4)).all()


@pytest.mark.parametrize("amax, scale", [
    (448.0, 1.0), (450.0, 2.0), (896.0, 2.0), (224.0, 0.5), (0.0, 2.0**-22), (1e-30, 2.0**-22),
])
def test_scale_at_powers_of_two_and_at_the_floor(amax, scale):
    q = torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    q[0, 0, 3] = amax
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    position, no_turn = torch.zeros(1, dtype=torch.int64), torch.tensor([[1.0] * 32 + [0.0] * 32])
    codes, weights = query_rope_quant(q, position, no_turn, one, 1.0, 1.0)
    assert weights.item() == scale
    assert codes[0, 0, 3].float() * scale == pytest.approx(q[0, 0, 3].float().item(), rel=2**-4, abs=scale * 2**-10)


def test_folding_the_scale_equals_scaling_the_query():
    """ReLU commutes with a positive factor: w' relu(q8 . k) is w relu(scale q8 . k)."""
    given = OP.cases[-1].inputs(seed=3)
    codes, weights = query_rope_quant(**given)
    scale = weights.double() / (given["weights"].double() * given["softmax_scale"] * given["head_scale"])
    key = torch.randn(128, dtype=torch.float64)
    folded = weights.double() * torch.relu(codes.double() @ key)
    plain = given["weights"].double() * torch.relu(codes.double() * scale[..., None] @ key)
    plain *= given["softmax_scale"] * given["head_scale"]
    assert torch.allclose(folded, plain, rtol=1e-6, atol=1e-9)


def test_nan_stays_in_its_head():
    given = OP.cases[2].inputs(seed=4)
    clean_codes, clean_weights = query_rope_quant(**given)
    given["q"][2, 5, 100] = float("nan")
    codes, weights = query_rope_quant(**given)
    others = torch.ones(codes.shape[:2], dtype=torch.bool)
    others[2, 5] = False
    assert torch.equal(codes.view(torch.uint8)[others], clean_codes.view(torch.uint8)[others])
    assert torch.equal(weights[others], clean_weights[others])
    assert not torch.isfinite(codes[2, 5].float() * weights[2, 5]).all()


def test_rows_do_not_depend_on_their_batch():
    given = OP.cases[-1].inputs(seed=5)
    codes, weights = query_rope_quant(**given)
    part = slice(100, 101)
    one = query_rope_quant(**given | {name: given[name][part] for name in ("q", "positions", "weights")})
    assert torch.equal(codes[part].view(torch.uint8), one[0].view(torch.uint8)) and torch.equal(weights[part], one[1])


@pytest.mark.parametrize("change, message", [
    ({"q": lambda x: x.float()}, "q is float32, must be bfloat16"),
    ({"q": lambda x: x[..., :64]}, r"q has 64 on axis 128"),
    ({"weights": lambda x: x[:, :-1]}, "weights has 7 on axis N, must be 8"),
    ({"cos_sin": lambda x: x.double()}, "cos_sin is float64"),
    ({"q": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension of q must be contiguous"),
])
def test_contract(change, message):
    given = OP.cases[-1].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        query_rope_quant(**given)
