# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.moe.route import OP, route


def derived(logits, bias, k, scaling):
    """One token in Python floats."""
    scores = [math.sqrt(math.log1p(math.exp(v)) if v < 30 else v) for v in logits]
    ids = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))[:k]
    total = math.fsum(scores[e] for e in ids) + 1e-20
    return ids, [scores[e] / total * scaling for e in ids]


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    weights, ids = route(**given)
    for t in range(ids.shape[0]):
        image = given["image_mask"] is not None and bool(given["image_mask"][t])
        bias = (given["image_bias"] if image else given["bias"]).double().tolist()
        want_ids, want = derived(given["logits"][t].double().tolist(), bias, given["k"], given["scaling"])
        assert ids[t].tolist() == want_ids
        assert weights[t].tolist() == pytest.approx(want, rel=1e-5)
    assert torch.allclose(weights.sum(-1), torch.full((ids.shape[0],), 1.5), rtol=1e-5)


def test_the_bias_selects_and_does_not_weigh():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    weights, ids = route(logits, torch.tensor([0.0, 0.0, 0.0, 10.0]), 2, 1.0)
    assert ids.tolist() == [[3, 0]]
    scores = torch.nn.functional.softplus(logits).sqrt()[0, [3, 0]]
    assert torch.allclose(weights[0], scores / scores.sum())


def test_image_tokens_take_their_own_bias():
    logits, bias, image_bias = torch.zeros(3, 8), torch.zeros(8), torch.zeros(8)
    bias[2], image_bias[5] = 1.0, 1.0
    _, ids = route(logits, bias, 1, 1.5, image_bias, torch.tensor([False, True, False]))
    assert ids.flatten().tolist() == [2, 5, 2]


def test_equal_scores_go_to_the_lower_expert():
    _, ids = route(torch.zeros(2, 384), torch.zeros(384), 6, 1.5)
    assert ids.tolist() == [list(range(6))] * 2


def test_scores_that_vanish_or_are_large_stay_finite():
    logits = torch.tensor([[-1e4, -1e4, -1e4], [80.0, 1e4, -1e4], [3.4e38, 0.0, -3.4e38]])
    weights, ids = route(logits, torch.zeros(3), 2, 1.5)
    assert torch.isfinite(weights).all() and not weights[0].any()
    assert weights[1:].sum(-1).tolist() == pytest.approx([1.5, 1.5])


def test_nan_logits_give_distinct_experts_in_range():
    logits = torch.randn(4, 16)
    logits[1], logits[2, 3] = torch.nan, torch.nan
    _, ids = route(logits, torch.zeros(16), 6, 1.5)
    assert ((ids >= 0) & (ids < 16)).all() and all(len(set(row)) == 6 for row in ids.tolist())


def test_same_bits_alone_and_in_a_batch():
    given = OP.cases[2].inputs(seed=2)
    weights, ids = route(**given)
    for t in range(0, 65, 8):
        one = route(**given | {n: given[n][t : t + 1] for n in ("logits", "image_mask")})
        assert torch.equal(one[0][0], weights[t]) and torch.equal(one[1][0], ids[t])


@pytest.mark.parametrize("change, message", [
    ({"k": 385}, "k is 385, must be 1 to 384"),
    ({"k": 0}, "k is 0"),
    ({"image_mask": None}, "image_bias and image_mask go together"),
    ({"image_bias": None}, "image_bias and image_mask go together"),
    ({"bias": torch.zeros(3)}, "bias has 3 on axis E, must be 384"),
    ({"logits": torch.zeros(65, 384, dtype=torch.bfloat16)}, "logits is bfloat16, must be float32"),
])
def test_contract(change, message):
    with pytest.raises(ContractError, match=message):
        route(**OP.cases[2].inputs() | change)
