# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.registry import Case
from vllm.ampere.kernels.spec_decode.markov_sampler import OP, markov_sampler
from vllm.ampere.testing.compare import assert_close


def derived(given, r, tokens):
    """Logits and scores of request r in float64, conditioned on the tokens the op chose."""
    previous, rows = [int(given["last_token"][r]), *tokens[:-1]], []
    logits = []
    for step, token in enumerate(previous):
        bias = (given["head"].double() * given["embed"][token].double()).sum(1)
        logits.append(given["base_logits"][r, step].double() + bias)
        temperature = float(given["temperature"][r])
        score = logits[-1]
        if given["gumbel"] is not None and temperature > 0:
            score = score / temperature + given["gumbel"][r, step].double()
        rows.append(score)
    return torch.stack(logits), torch.stack(rows)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    tokens, logits = markov_sampler(**given)
    assert tokens.dtype == torch.int64 and logits.dtype == torch.float32
    for r in range(tokens.shape[0]):
        want, scores = derived(given, r, tokens[r].tolist())
        assert_close(logits[r], want, OP.tolerances["logits"], f"request {r}")
        best = scores.max(-1).values
        assert (scores.gather(1, tokens[r, :, None])[:, 0] >= best - 1e-5 * best.abs()).all()


def test_the_bias_of_the_token_before_decides():
    """A head that maps token t to token t + 1 walks the vocabulary from the last token."""
    vocab = 16
    embed = torch.eye(vocab, dtype=torch.bfloat16)
    head = embed.roll(1, 0) * 8
    base, last = torch.zeros(2, 5, vocab), torch.tensor([3, 14])
    tokens, logits = markov_sampler(base, embed, head, last, torch.zeros(2), None)
    assert tokens.tolist() == [[4, 5, 6, 7, 8], [15, 0, 1, 2, 3]]
    assert logits[0, 0].tolist() == [8.0 if v == 4 else 0.0 for v in range(vocab)]
    assert not base.any()


def test_temperature_zero_ignores_the_noise():
    given = OP.cases[2].inputs(seed=2) | {"temperature": torch.zeros(3)}
    greedy = markov_sampler(**given | {"gumbel": None})
    given["gumbel"][0, 2, 5] = torch.nan
    for got, want in zip(markov_sampler(**given), greedy):
        assert torch.equal(got, want)
    assert torch.equal(greedy[0], greedy[1].argmax(-1))


def test_noise_acts_only_on_requests_with_a_temperature():
    given = OP.cases[2].inputs(seed=3) | {"temperature": torch.tensor([0.0, 1.0, 0.0])}
    given["gumbel"] = torch.full_like(given["gumbel"], -100.0)
    given["gumbel"][..., 77] = 100.0
    tokens, _ = markov_sampler(**given)
    assert tokens[1].tolist() == [77] * 5
    assert torch.equal(tokens[[0, 2]], markov_sampler(**given | {"gumbel": None})[0][[0, 2]])


def test_gumbel_draws_follow_the_softmax():
    """First token of 4000 requests with one distribution and fixed noise: chi-square against softmax(logits / T)."""
    case = Case("x", {"R": 4000, "V": 8, "F": 4, "gumbel": True, "dtype": torch.float32}, OP.cases[0].make)
    given = case.inputs(seed=4)
    given["base_logits"] = given["base_logits"][:1].expand(4000, 5, 8).contiguous()
    given |= {"last_token": torch.zeros(4000, dtype=torch.int64), "temperature": torch.full((4000,), 1.5)}
    tokens, logits = markov_sampler(**given)
    expected = (logits[0, 0].double() / 1.5).softmax(-1) * 4000
    seen = torch.bincount(tokens[:, 0], minlength=8).double()
    assert ((seen - expected) ** 2 / expected).sum() < 24.3  # 99.9% of chi-square, 7 degrees of freedom


def test_equal_scores_go_to_the_lower_token():
    zero = torch.zeros(1, 4, dtype=torch.bfloat16).expand(9, 4).contiguous()
    tokens, _ = markov_sampler(torch.zeros(1, 5, 9), zero, zero, torch.tensor([8]), torch.zeros(1), None)
    assert not tokens.any()


def test_same_bits_alone_and_in_a_batch():
    given = OP.cases[3].inputs(seed=5)
    tokens, logits = markov_sampler(**given)
    rows = ("base_logits", "last_token", "temperature", "gumbel")
    for r in (0, 8, 16):
        one = markov_sampler(**given | {name: given[name][r : r + 1] for name in rows})
        assert torch.equal(one[0][0], tokens[r]) and torch.equal(one[1][0], logits[r])


@pytest.mark.parametrize("change, message", [
    ({"base_logits": lambda x: x[:, :4]}, "base_logits has 4 on axis 5"),
    ({"head": lambda x: x[:-1]}, "head has 1026 on axis V, must be 1027"),
    ({"embed": lambda x: x.float()}, "embed is float32"),
    ({"last_token": lambda x: x.int()}, "last_token is int32"),
    ({"gumbel": lambda x: x.double()}, "gumbel is float64"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        markov_sampler(**given)
