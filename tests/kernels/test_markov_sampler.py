# SPDX-License-Identifier: Apache-2.0
import math
import struct

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.registry import Case
from vllm.ampere.kernels.spec_decode.markov_sampler import OP, markov_sampler
from vllm.ampere.kernels.spec_decode.reference import best_word, draft_noise_ref, token_of

INF, NAN = float("inf"), float("nan")
ROWS = ("base_logits", "last_token", "request", "position")


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 of a multiple of four bytes, seed 0, as its author publishes it."""
    h = 0
    for (k,) in struct.iter_unpack("<I", data):
        k = k * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h = h ^ k
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
    h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
    return h ^ h >> 16


def gumbel(seed, step, position, token):
    seed = (seed ^ step << 32) % 2**64
    data = struct.pack("<IIII", seed % 2**32, seed >> 32, position - 1 + 2**30, token)
    return -math.log(-math.log1p(-(murmur3(data) + 0.5) / 2**32))


def sized(seed, **sizes):
    case = Case("", {"R": 3, "S": 5, "V": 64, "F": 16, "drafts": True} | sizes, OP.cases[0].make)
    return case.inputs(seed)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    """Logits and winners in float64, conditioned on the tokens that the op chose, with noise hashed from bytes."""
    given = case.inputs(seed=1)
    tokens = markov_sampler(**given)
    for r, row in enumerate(tokens[:3].tolist()):
        request = int(given["request"][r, 0])
        temperature = float(given["temperature"][request]) if case.sizes["drafts"] and request >= 0 else 0.0
        for step, (previous, token) in enumerate(zip([int(given["last_token"][r]), *row], row)):
            bias = (given["head"].double() * given["embed"][previous].double()).sum(1).bfloat16()
            logits = (given["base_logits"][r, step].double() + bias.double()).bfloat16()
            scores = logits.double()
            if case.sizes["drafts"] and request >= 0:
                assert torch.equal(given["draft_logits"][request, step], logits)
            if temperature:
                place = int(given["seeds"][request]), step, int(given["position"][r, step])
                noise = torch.tensor([gumbel(*place, v) for v in range(len(scores))], dtype=torch.float64)
                scores = scores / temperature + noise
                assert scores[token] >= scores.max() - 1e-5
            else:
                assert token == int(scores.argmax())
    untouched = set(range(len(given["seeds"]))) - set(given["request"].flatten().tolist())
    assert not case.sizes["drafts"] or not given["draft_logits"][sorted(untouched)].any()


def test_the_bias_of_the_token_before_decides():
    """A head that maps token t to token t + 1 walks the vocabulary from the last token."""
    given = sized(1, R=2, V=16, F=16, drafts=False)
    given["embed"] = torch.eye(16, dtype=torch.bfloat16)
    given["head"] = given["embed"].roll(1, 0) * 8
    given["base_logits"].zero_()
    given["last_token"] = torch.tensor([3, 14], dtype=torch.int32)
    assert markov_sampler(**given).tolist() == [[4, 5, 6, 7, 8], [15, 0, 1, 2, 3]]
    assert not given["base_logits"].any()


def test_draws_follow_the_softmax():
    """First tokens of 4000 seeds with one distribution: chi-square against softmax(logits / T)."""
    given = sized(4, R=4000, V=8, F=4)
    given["base_logits"] = given["base_logits"][:1].repeat(4000, 1, 1)
    given["head"].zero_()
    given["temperature"].fill_(1.5)
    given["request"] = torch.arange(4000)[:, None].repeat(1, 5)
    tokens = markov_sampler(**given)
    expected = (given["base_logits"][0, 0].double() / 1.5).softmax(-1) * 4000
    seen = torch.bincount(tokens[:, 0], minlength=8).double()
    assert ((seen - expected) ** 2 / expected).sum() < 24.3  # 99.9% of chi-square, 7 degrees of freedom


def test_noise_is_small_where_float32_would_round_it_away():
    """Over a million draws the largest noise is beyond what 24 bits of u could give, and the mean is Euler's number."""
    token = torch.arange(1 << 20)
    noise = draft_noise_ref(torch.tensor([12345]), 3, torch.tensor([99]), token)[0]
    assert abs(float(noise.mean()) - 0.5772) < 0.01 and noise.isfinite().all()
    some = torch.cat([noise.topk(50).indices, token[:50]])
    want = torch.tensor([gumbel(12345, 3, 99, t) for t in some.tolist()])
    torch.testing.assert_close(noise[some], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("row, token", [
    ([1.0, 3.0, 3.0, 2.0], 1),
    ([NAN, 3.0, NAN, 5.0], 3),
    ([NAN, NAN, -INF, -INF], 2),
    ([NAN, NAN, NAN, NAN], 0),
    ([-INF, -INF, -INF, -INF], 0),
    ([-0.0, 0.0, -1.0, NAN], 0),
    ([-1.0, -0.0, 0.0, -1e-45], 1),
    ([INF, 1.0, INF, NAN], 0),
    ([-3.0, -2.0, -2.5, -2.0], 1),
])
def test_ties_nan_and_infinities(row, token):
    words = best_word(torch.tensor([row]), first_token=1000)
    assert token_of(words).tolist() == [1000 + token] and words > 0


def test_larger_scores_and_then_lower_tokens_have_larger_words():
    bits = torch.randint(-(2**31), 2**31, (20_000, 2), generator=torch.Generator().manual_seed(1)).int()
    scores = bits.view(torch.float32)
    scores = scores[~scores.isnan().any(1)]
    a, b = (best_word(s[:, None], first_token=t) for s, t in zip(scores.t(), (70_000, 69_999)))
    assert torch.equal(a > b, scores[:, 0] > scores[:, 1])


def test_a_row_of_nan_samples_a_token_that_exists():
    given = sized(6)
    given["base_logits"][1] = NAN
    given["temperature"][given["request"][1, 0]] = 0.7
    assert markov_sampler(**given)[1].tolist() == [0] * 5


def test_padded_rows_are_greedy_and_leave_no_logits():
    given = sized(7, R=4)
    given["request"][:] = -1
    given["temperature"].fill_(1.0)
    given["draft_logits"].fill_(NAN)
    alone = {n: given[n].clone() if n == "draft_logits" else given[n] for n in given}
    assert torch.equal(markov_sampler(**given), markov_sampler(**alone | {"draft_logits": None}))
    assert given["draft_logits"].isnan().all()


def test_same_bits_alone_and_in_a_batch():
    given = sized(5, R=17, V=200)
    tokens, recorded = markov_sampler(**given), given["draft_logits"].clone()
    for r in (0, 8, 15):
        one = given | {name: given[name][r : r + 1] for name in ROWS} | {"draft_logits": torch.zeros_like(recorded)}
        assert torch.equal(markov_sampler(**one)[0], tokens[r])
        state = given["request"][r, 0]
        assert torch.equal(one["draft_logits"][state], recorded[state])


@pytest.mark.parametrize("change, message", [
    ({"request": lambda x: x[:, :4]}, "request has 4 on axis S, must be 5"),
    ({"embed": lambda x: x.float()}, "embed is float32"),
    ({"last_token": lambda x: x.float()}, "last_token is float32"),
    ({"seeds": lambda x: x[:-1]}, "seeds has 5 on axis Q, must be 6"),
    ({"embed": lambda x: x[:-1]}, "columns 0 to 64 of a vocabulary of 63"),
    ({"draft_logits": lambda x: x[..., :-1]}, "draft_logits has 63 on axis W, must be at least 64"),
])
def test_contract(change, message):
    given = sized(8)
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        markov_sampler(**given)


def test_columns_of_a_shard_are_inside_the_vocabulary():
    given = sized(8)
    with pytest.raises(ContractError, match="columns 1 to 65 of a vocabulary of 64"):
        markov_sampler(**given, first_token=1)
