# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.mhc.mhc_pre import OP, mhc_pre
from vllm.ampere.kernels.registry import Case
from vllm.ampere.testing.compare import assert_close


def coefficients(x, given):
    """pre, post and comb of one projected vector, in Python floats and loops."""
    x = x.double().tolist()
    norm = 1 / math.sqrt(math.fsum(v * v for v in x) / len(x) + given["rms_eps"])
    scale, base = given["scale"].double().tolist(), given["base"].double().tolist()
    z = [math.fsum(a * b for a, b in zip(row, x)) * norm for row in given["fn"].double().tolist()]
    z = [v * scale[min(i // 4, 2)] + base[i] for i, v in enumerate(z)]
    pre = [1 / (1 + math.exp(-v)) + given["pre_eps"] for v in z[:4]]
    post = [given["post_alpha"] / (1 + math.exp(-v)) for v in z[4:8]]
    comb = []
    for j in range(4):
        row = [math.exp(v - max(z[8 + 4 * j : 12 + 4 * j])) for v in z[8 + 4 * j : 12 + 4 * j]]
        comb.append([v / sum(row) + given["sinkhorn_eps"] for v in row])
    for turn in range(2 * given["sinkhorn_iters"] - 1):
        if turn % 2 == 0:
            sums = [sum(comb[j][k] for j in range(4)) + given["sinkhorn_eps"] for k in range(4)]
            comb = [[comb[j][k] / sums[k] for k in range(4)] for j in range(4)]
        else:
            comb = [[v / (sum(row) + given["sinkhorn_eps"]) for v in row] for row in comb]
    return pre, post, comb


def collapsed(given, t):
    """Input of the sublayer at token t in float64, rounded to bfloat16 where the model rounds it."""
    streams = given["streams"][t].double()
    mix = torch.tensor([1.0, 0, 0, 0]) if given["pre_mix"] is None else given["pre_mix"][t]
    u = (mix.double() @ streams).bfloat16().double()
    if given["norm_weight"] is None:
        return u
    return u / torch.sqrt((u @ u) / len(u) + given["norm_eps"]) * given["norm_weight"].double()


def assert_oracle(given, tokens):
    post, comb, layer_input, pre = mhc_pre(**given)
    for t in tokens:
        x = given["streams"][t].flatten() if given["x"] is None else given["x"][t]
        want = coefficients(x, given)
        for got, value, name in zip((pre[t], post[t, :, 0], comb[t]), want, ("pre", "post", "comb")):
            assert_close(got, torch.tensor(value, dtype=torch.float64), OP.tolerances[name], f"{name} of token {t}")
        assert_close(layer_input[t], collapsed(given, t), OP.tolerances["layer_input"], f"input of token {t}")


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    count = given["streams"].shape[0]
    assert_oracle(given, sorted({0, count // 2, count - 1} & set(range(count))))


@pytest.mark.parametrize("absent", ["pre_mix", "norm_weight"])
def test_oracle_without(absent):
    given = OP.cases[2].inputs(seed=2)
    assert_oracle(given | {absent: None}, [5])


def test_first_layer_shortcut_equals_the_whole_projection():
    given = OP.cases[2].inputs(seed=3)
    x = given["streams"][:, 0].contiguous()
    given |= {"streams": x.unsqueeze(1).repeat(1, 4, 1), "pre_mix": None}
    summed = given["fn"].unflatten(1, (4, -1)).sum(1)
    whole, short = mhc_pre(**given), mhc_pre(**given | {"fn": summed, "x": x})
    for name, got, want in zip(("post", "comb", "layer_input", "pre"), short, whole):
        assert_close(got, want, OP.tolerances[name], name)
    assert torch.equal(short[2], whole[2])


@pytest.mark.parametrize("tokens", [1, 63, 4097])
def test_comb_is_doubly_stochastic(tokens):
    """Columns to rounding and epsilon, since they come last; rows as far as 20 turns converge."""
    case = Case("x", {"T": tokens, "D": 32, "first": False}, OP.cases[0].make)
    post, comb, _, pre = mhc_pre(**case.inputs(seed=tokens))
    assert (comb > 0).all() and (post > 0).all() and (post < 2).all() and (pre > 1e-6).all()
    assert ((comb.double().sum(1) - 1).abs() < 3e-6).all()
    assert (comb.double().sum(2) - 1).abs().mean() < 1e-3
    more = case.inputs(seed=tokens) | {"sinkhorn_iters": 1000}
    assert ((mhc_pre(**more)[1].double().sum(2) - 1).abs() < 3e-6).all()


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_few_sinkhorn_turns(turns):
    """Before the iteration converges, a turn more or less shows."""
    given = OP.cases[2].inputs(seed=4) | {"sinkhorn_iters": turns}
    assert_oracle(given, [0, 7])
    assert ((mhc_pre(**given)[1].sum(2) - 1).abs() > 1e-3).any()


@pytest.mark.parametrize("number", [
    {"rms_eps": 0.3}, {"pre_eps": 0.05}, {"sinkhorn_eps": 0.02}, {"norm_eps": 0.2}, {"post_alpha": 3.0},
])
def test_each_number_acts_where_it_belongs(number):
    assert_oracle(OP.cases[2].inputs(seed=8) | number, [3, 40])


def test_the_stream_scale_cancels_and_zero_streams_stay_finite():
    given = OP.cases[2].inputs(seed=5)
    want = mhc_pre(**given)
    got = mhc_pre(**given | {"streams": given["streams"] * 64})
    for name, a, b in zip(("post", "comb", "layer_input", "pre"), got, want):
        assert_close(a, b, OP.tolerances[name], name)
    post, comb, layer_input, pre = mhc_pre(**given | {"streams": torch.zeros_like(given["streams"])})
    assert not layer_input.any() and all(torch.isfinite(v).all() for v in (post, comb, pre))


def test_same_bits_alone_and_in_a_batch():
    for case in OP.cases[2:]:
        given = case.inputs(seed=6)
        whole = mhc_pre(**given)
        for t in (0, 17, given["streams"].shape[0] - 1):
            rows = {n: given[n][t : t + 1] for n in ("streams", "pre_mix", "x") if given[n] is not None}
            for one, all_rows in zip(mhc_pre(**given | rows), whole):
                assert torch.equal(one[0], all_rows[t])


def test_nan_stays_in_its_token():
    given = OP.cases[2].inputs(seed=7)
    clean = mhc_pre(**given)
    given["streams"][9, 2, 100] = torch.nan
    others = torch.arange(63) != 9
    for got, want in zip(mhc_pre(**given), clean):
        assert torch.equal(got[others], want[others]) and got[9].isnan().any()


@pytest.mark.parametrize("change, message", [
    ({"streams": lambda x: x[:, :3].contiguous()}, "streams has 3 on axis 4"),
    ({"fn": lambda x: x[:, :256].contiguous()}, "fn has 256 columns, must have 1024"),
    ({"fn": lambda x: x.bfloat16()}, "fn is bfloat16, must be float32"),
    ({"pre_mix": lambda x: x[:5]}, "pre_mix has 5 on axis T, must be 63"),
    ({"streams": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}, "streams must be contiguous"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        mhc_pre(**given)
    with pytest.raises(ContractError, match="fn has 1024 columns, must have 256"):
        mhc_pre(**OP.cases[2].inputs() | {"x": torch.zeros(63, 256, dtype=torch.bfloat16)})
