# SPDX-License-Identifier: Apache-2.0
"""Edges of the Triton kernels of engram, routing and sampling; `tests/gpu/test_choices.py` runs the same on a card."""

import pytest
import torch

from tests.interpreter.test_indexer import INF, NAN, both, moved, sized, triton_of
from vllm.ampere.kernels.engram.engram_gate import OP as ENGRAM_GATE
from vllm.ampere.kernels.engram.engram_lookup import OP as ENGRAM_LOOKUP
from vllm.ampere.kernels.moe.route import OP as ROUTE
from vllm.ampere.kernels.spec_decode.markov_sampler import OP as MARKOV_SAMPLER
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


def test_sampler_takes_the_lower_of_equal_tokens(device):
    """Equal logits everywhere, over many tiles; a hot request with equal noise; a request of NaN."""
    given = sized(MARKOV_SAMPLER, 4, R=3, V=300, F=32)
    given["base_logits"][:], given["head"][:], given["gumbel"][:] = 2.0, 0.0, 0.25
    given["base_logits"][1, 1, 70:] = 3.0
    given["base_logits"][2, 3, 250:] = NAN
    given["temperature"] = torch.tensor([0.0, 0.7, 0.0])
    function = triton_of(MARKOV_SAMPLER)
    got = produce(MARKOV_SAMPLER, function, moved(given, device))
    assert got["tokens"].tolist() == [[0, 0, 0, 0, 0], [0, 70, 0, 0, 0], [0, 0, 0, 250, 0]]
    assert_parity(MARKOV_SAMPLER, got, produce(MARKOV_SAMPLER, MARKOV_SAMPLER.reference, given))


def test_a_request_samples_alike_alone(device):
    given = moved(sized(MARKOV_SAMPLER, 5, R=18, V=150, F=32), device)
    tokens, logits = triton_of(MARKOV_SAMPLER)(**given)
    rows = ("base_logits", "last_token", "temperature", "gumbel")
    for r in (0, 17):
        alone = triton_of(MARKOV_SAMPLER)(**given | {n: given[n][r : r + 1] for n in rows})
        assert torch.equal(alone[0][0], tokens[r]) and torch.equal(alone[1][0], logits[r])
