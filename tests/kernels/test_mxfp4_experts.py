# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.moe.mxfp4_experts import OP, mxfp4_experts
from vllm.ampere.kernels.registry import Case
from vllm.ampere.testing.compare import assert_close

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def matrix(packed, scales):
    """Decode an MXFP4 matrix by table, one byte at a time."""
    rows = []
    for codes, exponents in zip(packed.tolist(), scales.tolist()):
        nibbles = [n for byte in codes for n in (byte & 15, byte >> 4)]
        signed = [-E2M1[n & 7] if n & 8 else E2M1[n] for n in nibbles]
        rows.append([math.ldexp(v, exponents[i // 32] - 127) for i, v in enumerate(signed)])
    return torch.tensor(rows, dtype=torch.float64)


def derived(given, t, clamp=True):
    """One token in float64, expert by expert, the weight before W2 as in model_spec section 6."""
    x, limit = given["x"][t].double(), given["limit"]
    out = torch.zeros_like(x)
    for weight, e in zip(given["topk_weights"][t].double(), given["topk_ids"][t].tolist()):
        if not 0 <= e < given["w13"].shape[0]:
            continue
        gate, up = (matrix(given["w13"][e], given["w13_scale"][e]) @ x).chunk(2)
        if clamp:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        out += matrix(given["w2"][e], given["w2_scale"][e]) @ (weight * gate / (1 + torch.exp(-gate)) * up)
    return out


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    got = mxfp4_experts(**given)
    assert got.dtype == torch.bfloat16 and got.shape == given["x"].shape
    for t in range(0, got.shape[0], 30):
        assert_close(got[t], derived(given, t), OP.tolerances["y"], f"token {t}")


def test_clamp_at_activations_of_50():
    """Activations of +-50 reach the clamp on every side; without it the result is another one."""
    case = Case("x", {"T": 6, "E": 4, "D": 64, "I": 64, "K": 2}, OP.cases[0].make)
    given = case.inputs(seed=2)
    given["x"] = torch.where(given["x"] < 0, -50.0, 50.0).bfloat16()
    given["w13_scale"].fill_(124)
    given["topk_ids"] = given["topk_ids"].remainder(4).int()
    e, x = int(given["topk_ids"][0, 0]), given["x"][0].double()
    gate, up = (matrix(given["w13"][e], given["w13_scale"][e]) @ x).chunk(2)
    assert (gate > 10).any() and (gate < -10).any() and (up > 10).any() and (up < -10).any()
    got = mxfp4_experts(**given)
    for t in range(6):
        assert_close(got[t], derived(given, t), OP.tolerances["y"], f"token {t}")
        with pytest.raises(AssertionError, match="relative norm"):
            assert_close(got[t], derived(given, t, clamp=False), OP.tolerances["y"])


def test_experts_of_other_ranks_add_nothing():
    given = OP.cases[2].inputs(seed=3)
    experts, k = given["w13"].shape[0], given["topk_ids"].shape[1]
    for outside in (-1, experts, 2**31 - 1, -(2**31)):
        assert not mxfp4_experts(**given | {"topk_ids": torch.full_like(given["topk_ids"], outside)}).any()
    one = given["topk_ids"].clamp(0, experts - 1)
    one[:, 1:] = -1
    poison = given["topk_weights"].clone()
    poison[:, 1:] = torch.nan
    want = mxfp4_experts(**given | {"topk_ids": one[:, :1].contiguous(), "topk_weights": poison[:, :1].contiguous()})
    assert k > 1 and torch.equal(mxfp4_experts(**given | {"topk_ids": one, "topk_weights": poison}), want)


def test_ranks_sum_to_the_whole():
    given = OP.cases[2].inputs(seed=4)
    given["topk_ids"] = given["topk_ids"].clamp(0, 7)
    whole = mxfp4_experts(**given).double()
    parts = torch.zeros_like(whole)
    for first in (0, 4):
        rank = {name: given[name][first : first + 4] for name in ("w13", "w13_scale", "w2", "w2_scale")}
        parts += mxfp4_experts(**given | rank | {"topk_ids": given["topk_ids"] - first}).double()
    assert_close(parts, whole, OP.tolerances["y"])


def test_order_of_the_choices_changes_no_bit():
    given = OP.cases[3].inputs(seed=5)
    order = torch.randperm(6)
    moved = {name: given[name][:, order].contiguous() for name in ("topk_weights", "topk_ids")}
    assert torch.equal(mxfp4_experts(**given | moved), mxfp4_experts(**given))


def test_same_bits_alone_and_in_a_batch():
    given = OP.cases[3].inputs(seed=6)
    whole = mxfp4_experts(**given)
    rows = ("x", "topk_weights", "topk_ids")
    for t in (0, 1, 64, 128):
        assert torch.equal(mxfp4_experts(**given | {n: given[n][t : t + 1] for n in rows})[0], whole[t])
    assert torch.equal(mxfp4_experts(**given | {n: given[n].flip(0) for n in rows}).flip(0), whole)


def test_nan_stays_in_its_token():
    given = OP.cases[2].inputs(seed=7)
    clean = mxfp4_experts(**given)
    given["x"][5] = torch.nan
    got = mxfp4_experts(**given)
    others = torch.arange(got.shape[0]) != 5
    assert torch.equal(got[others], clean[others]) and got[5].isnan().all()


@pytest.mark.parametrize("change, message", [
    ({"w13": lambda w: w.view(torch.int8)}, "w13 is int8, must be uint8"),
    ({"w13": lambda w: w[:, :-2]}, "w13 has 190 on axis 64[*]J, must be a multiple of 64"),
    ({"w2_scale": lambda w: w[..., :-1]}, "w2_scale has 2 on axis J, must be 3"),
    ({"topk_ids": lambda w: w.long()}, "topk_ids is int64, must be int32"),
    ({"topk_weights": lambda w: w[:, :-1]}, "topk_ids has 3 on axis K, must be 2"),
    ({"x": lambda x: x.float()}, "x is float32, must be bfloat16"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        mxfp4_experts(**given)
