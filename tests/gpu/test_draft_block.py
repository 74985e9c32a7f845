# SPDX-License-Identifier: Apache-2.0
"""The draft sampler on the card, at the model's vocabulary, beside upstream's own loop on random weights."""

import importlib.util

import pytest
import torch

from benchmarks.rivals import upstream_loop
from vllm.ampere.kernels.registry import Case
from vllm.ampere.kernels.spec_decode.markov_sampler import OP

ABSENT = importlib.util.find_spec("vllm.platforms") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ABSENT, reason="vLLM is not installed")]
SAMPLERS = {i.name: i.function for i in OP.implementations}


@pytest.fixture(scope="module")
def weights():
    """Random ones, as trained ones would be: products that round."""
    embed, head = (torch.randn(129_280, 256, device="cuda", dtype=torch.bfloat16) * s for s in (1.0, 256**-0.5))
    return {"embed": embed, "head": head}


def block(weights, requests, noise, seed):
    case = Case("", {"R": requests, "S": 5, "V": 64, "F": 16, "drafts": noise}, OP.cases[0].make)
    given = case.inputs(seed, "cuda") | weights
    given["base_logits"] = torch.randn(requests, 5, 129_280, device="cuda").mul(2).bfloat16()
    given["last_token"] = torch.randint(129_280, (requests,), device="cuda")
    if noise:
        given["draft_logits"] = torch.zeros(requests + 3, 5, 129_280, dtype=torch.bfloat16, device="cuda")
    return given


def upstream(given):
    given = given | {"draft_logits": None if given["draft_logits"] is None else given["draft_logits"].clone()}
    call, result = upstream_loop(given)
    call()
    return result(None), given["draft_logits"]


@pytest.mark.parametrize("requests, blocks", [(1, 2000), (8, 1000)])
def test_ten_thousand_greedy_requests_are_upstreams(weights, requests, blocks):
    """The same product of the same shape, and then the same token, ties of bfloat16 logits included."""
    for seed in range(blocks):
        given = block(weights, requests, False, seed)
        assert torch.equal(SAMPLERS["triton"](**given), upstream(given)[0]), f"{requests} requests, seed {seed}"


@pytest.mark.parametrize("requests", [1, 3, 8, 64])
def test_noise_is_upstreams(weights, requests):
    for seed in range(50):
        given = block(weights, requests, True, seed)
        want, recorded = upstream(given)
        assert torch.equal(SAMPLERS["triton"](**given), want), f"{requests} requests, seed {seed}"
        assert torch.equal(given["draft_logits"], recorded)


def test_product_inside_differs_where_a_bias_rounds_otherwise_only(weights):
    """Another order of summation: of 4,000 greedy drafts of first tokens, few may differ, each by a bfloat16 step."""
    differing = 0
    for seed in range(500):
        given = block(weights, 8, False, seed)
        inside, want = SAMPLERS["triton-inside"](**given)[:, 0], upstream(given)[0][:, 0]
        bias = weights["embed"][given["last_token"]].float() @ weights["head"].float().t()
        logits = given["base_logits"][:, 0].float() + bias
        gap = logits.gather(1, want[:, None]) - logits.gather(1, inside[:, None])
        assert (gap.abs() <= 2 * 2**-8 * logits.amax(1, keepdim=True)).all()
        differing += int((inside != want).sum())
    assert differing < 40


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("noise", [False, True])
def test_replays_follow_the_inputs(weights, name, noise):
    """A captured graph on other logits, seeds and temperatures samples what a call on them does."""
    given = block(weights, 4, noise, 1)
    SAMPLERS[name](**given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = SAMPLERS[name](**given)
    for seed in range(2, 12):
        other = block(weights, 4, noise, seed)
        for key in ("base_logits", "last_token", "request", "position", "temperature", "seeds"):
            given[key].copy_(other[key])
        graph.replay()
        assert torch.equal(tokens, SAMPLERS[name](**other))
