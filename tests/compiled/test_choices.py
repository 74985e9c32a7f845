# SPDX-License-Identifier: Apache-2.0
"""Edges of the Triton kernels of engram, routing and sampling; `tests/gpu/test_choices.py` runs the same on a card."""

import pytest
import torch

from tests.compiled.test_indexer import INF, NAN, both, moved, sized, triton_of
from vllm.ampere.kernels.engram.engram_gate import OP as ENGRAM_GATE
from vllm.ampere.kernels.engram.engram_lookup import OP as ENGRAM_LOOKUP
from vllm.ampere.kernels.moe.route import OP as ROUTE
from vllm.ampere.kernels.spec_decode.markov_sampler import OP as MARKOV_SAMPLER
from vllm.ampere.kernels.spec_decode.reference import best_word, draft_noise_ref
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.parity import assert_parity, assert_same_bits, produce


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_any_stride_value_and_type(device, dtype):
    given = sized(ENGRAM_LOOKUP, 1, T=5, C=3, R=40)
    extremes = torch.tensor([torch.iinfo(dtype).min, -1, 999, 1000, 1039, 1040, torch.iinfo(dtype).max])
    rows = extremes[torch.arange(15) % 7].view(3, 5).to(dtype)
    given["table"][0], given["scales"][39] = torch.arange(256), torch.tensor([0, 1, 9, 10, 246, 247, 254, 255])
    there = moved(given, device) | {"rows": rows.to(device).t()}
    got = triton_of(ENGRAM_LOOKUP)(**there)
    want = ENGRAM_LOOKUP.reference(**given | {"rows": rows.t()})
    assert_close(got.cpu(), want, ENGRAM_LOOKUP.tolerances["embedding"])


@pytest.mark.parametrize("tokens", [1, 700, 1400])
def test_rows_go_where_the_caller_says(device, tokens):
    """Into three of five columns, with gaps between tokens: more pairs than all programs hold at once, and enough to be sorted."""
    given = sized(ENGRAM_LOOKUP, 3, T=tokens, C=3, R=40)
    staged = torch.full((tokens, 5, 264), NAN, dtype=torch.bfloat16, device=device)
    there = moved(given, device) | {"out": staged[:, 1:4, :256]}
    got = produce(ENGRAM_LOOKUP, triton_of(ENGRAM_LOOKUP), there)
    want = ENGRAM_LOOKUP.reference(**given)
    assert got["embedding"].data_ptr() == staged[:, 1:4].data_ptr()
    assert torch.equal(staged[:, 1:4, :256].cpu(), want) and want.any()
    assert staged[:, [0, 4]].isnan().all() and staged[..., 256:].isnan().all()


def test_gate_of_dead_tokens_zeros_and_nan(device):
    given = sized(ENGRAM_GATE, 2, T=5, D=96, mask=True)
    given["live"] = torch.tensor([True, False, True, True, False])
    given["streams"][2, 1] = 0
    given["streams"][3, 2, 7] = NAN
    got, want = both(ENGRAM_GATE, given, device)
    assert_close(got, want, ENGRAM_GATE.tolerances["streams"])
    assert_same_bits({"dead": got[[1, 4]]}, {"dead": given["streams"][[1, 4]]})


def test_route_of_ties_nan_and_infinities(device):
    given = sized(ROUTE, 3, T=6, E=24, K=6, image=False)
    given["bias"] = given["bias"].round()
    given["logits"][0] = 1.0
    given["logits"][1, 5] = NAN
    given["logits"][2, ::2] = -INF
    given["logits"][3, 4] = 60.0
    given["logits"][4] = torch.linspace(-80, 30, 24)
    weights, ids = (t.cpu() for t in triton_of(ROUTE)(**moved(given, device)))
    want_weights, want_ids = ROUTE.reference(**given)
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights, ROUTE.tolerances["weights"])
    assert weights[1].isnan().all() and len(set(ids[1].tolist())) == 6


SAMPLERS = [i.function for i in MARKOV_SAMPLER.implementations]
each_sampler = pytest.mark.parametrize("function", SAMPLERS, ids=[i.name for i in MARKOV_SAMPLER.implementations])


def _sampled(function, given, device):
    """What an implementation makes of the arguments, having equalled the reference."""
    got = produce(MARKOV_SAMPLER, function, moved(given, device))
    assert_parity(MARKOV_SAMPLER, got, produce(MARKOV_SAMPLER, MARKOV_SAMPLER.reference, given))
    return {name: tensor.cpu() for name, tensor in got.items()}


@each_sampler
def test_sampler_of_ties_nan_and_infinities(device, function):
    """Equal logits over many tiles; a row of one candidate among NaN; rows of NaN and of -inf, cold and hot."""
    given = sized(MARKOV_SAMPLER, 4, R=6, V=1300, F=32)
    given["base_logits"][:], given["head"][:] = 2.0, 0.0
    given["base_logits"][1, 1, 1070:] = 3.0
    given["base_logits"][2, :, :1250], given["base_logits"][2, :, 1251:] = NAN, NAN
    given["base_logits"][3:5] = NAN
    given["base_logits"][5] = -INF
    given["request"] = torch.arange(6)[:, None].repeat(1, 5)
    given["temperature"] = torch.tensor([0, 0, 0.7, 0, 0.7, 0, 0, 0, 0])
    tokens = _sampled(function, given, device)["tokens"].tolist()
    assert tokens == [[0] * 5, [0, 1070, 0, 0, 0], [1250] * 5, [0] * 5, [0] * 5, [0] * 5]


@each_sampler
@pytest.mark.parametrize("requests", [1, 2, 15, 16, 33])
def test_sampler_of_any_batch_and_strided_rows(device, function, requests):
    """Of requests in any order, logits as a slice of wider rows, and one row of state padded."""
    given = sized(MARKOV_SAMPLER, requests, R=requests, V=190, F=32)
    given["base_logits"] = torch.cat([given["base_logits"], given["base_logits"]], -1)[..., :190]
    got = _sampled(function, given, device)
    assert len({tuple(row) for row in got["tokens"].tolist()}) > requests // 2


@each_sampler
def test_a_request_samples_alike_alone(device, function):
    """Hot and cold, whatever is beside it: the weights' products are exact, so every product has the same bits."""
    given = moved(sized(MARKOV_SAMPLER, 5, R=18, V=150, F=32), device)
    tokens = function(**given)
    for r in (0, 16, 17):
        alone = {n: given[n][r : r + 1] for n in ("base_logits", "last_token", "request", "position")}
        assert torch.equal(function(**given | alone)[0], tokens[r])


@each_sampler
@pytest.mark.parametrize("cut", [0, 64, 301])
def test_a_shard_of_the_vocabulary_samples_the_same(device, function, cut):
    """One shard by the kernel, the other's words by the reference: tokens and recorded logits of the whole."""
    given = sized(MARKOV_SAMPLER, 6, R=5, V=320, F=32)
    whole = given | {"draft_logits": given["draft_logits"].clone()}
    tokens = MARKOV_SAMPLER.reference(**whole)
    state = given["request"].clamp_min(0)
    temperature = torch.where(given["request"] >= 0, given["temperature"][state], 0.0)
    scores = (given["base_logits"] + _bias(given, tokens)).float()
    for step in range(5):
        position, heat = given["position"][:, step], temperature[:, step, None]
        noise = draft_noise_ref(given["seeds"][state[:, step]], step, position, torch.arange(320))
        hot = scores[:, step] / heat.where(heat > 0, torch.ones(())) + noise
        scores[:, step] = torch.where(heat > 0, hot, scores[:, step])
    there = moved(given, device)
    for first, last in ((0, cut), (cut, 320)):
        other = scores[..., cut:] if first == 0 else scores[..., :cut]
        start, sent = (cut if first == 0 else 0), []

        def exchange(word, other=other, start=start, sent=sent):
            absent = other.shape[-1] == 0
            words = torch.zeros(5, dtype=torch.int64) if absent else best_word(other[:, len(sent)], start)
            sent.append(word)
            return torch.stack([word, words.to(word.device)])

        shard = {"base_logits": there["base_logits"][..., first:last], "head": there["head"][first:last]}
        got = function(**there | shard, first_token=first, exchange=exchange)
        assert torch.equal(got.cpu(), tokens) and len(sent) == 5
    assert torch.equal(there["draft_logits"].cpu(), whole["draft_logits"])


def _bias(given, tokens):
    """The bias that each step had, bfloat16 [R, S, V]."""
    before = torch.cat([given["last_token"][:, None], tokens[:, :-1]], 1)
    return (given["embed"][before].float() @ given["head"].float().t()).bfloat16()
