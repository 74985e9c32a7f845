# SPDX-License-Identifier: Apache-2.0
"""Patch 0560: who computes the boundary of a batch, that ours gets the arguments by their names, and what is warmed."""

import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.ampere.integration import gate, mhc
from vllm.ampere.integration.warmup import BOUNDARY_KERNELS
from vllm.ampere.kernels.mhc.mhc_post_pre import OP
from vllm.ampere.kernels.registry import Case
from vllm.ampere.testing.specialization import recorded_launches

ORDER = ("y", "streams", "post", "comb", "fn", "scale", "base", "rms_eps", "pre_eps", "sinkhorn_eps", "post_alpha",
         "sinkhorn_iters")  # fmt: skip
NAMED = ("pre_mix", "norm_weight", "norm_eps", "capture_aux")


def upstream(*arguments, **named):
    return "upstream"


def rule(monkeypatch, kernels, up_to, first):
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", kernels)
    monkeypatch.setattr(mhc, "_OURS_UP_TO", up_to)
    monkeypatch.setattr(mhc, "_OURS_FROM", first)


@pytest.mark.parametrize("kernels, upstreams", [
    ("", range(5, 9)), ("markov_sampler=reference", range(5, 9)), ("*=reference", range(5, 9)),
    ("mhc_post_pre=upstream", range(12)), ("mhc_post_pre=reference", ()), ("mhc_post_pre=triton", ()),
])
def test_who_serves_a_batch(kernels, upstreams, monkeypatch):
    rule(monkeypatch, kernels, 4, 9)
    monkeypatch.setattr(mhc, "post_pre", lambda *arguments, **named: "ours")

    def served():
        return [tokens for tokens in range(12) if mhc.boundary(upstream)(torch.empty(tokens, 64), 1, named=2) == "upstream"]

    assert served() == list(upstreams)
    monkeypatch.setattr(gate, "architecture", lambda: None)
    assert served() == list(range(12))


def test_one_token_and_long_batches_are_ours():
    """The rule as it is: one token, and a batch that four launches compute."""
    assert mhc.serves(1) and mhc.serves(8192)


def test_ours_through_upstreams_function(monkeypatch):
    """The patched function of the model, with every number different from every other."""
    from vllm.models.deepseek_v41.nvidia.ops import mhc as upstream_mhc

    rule(monkeypatch, "mhc_post_pre=reference", 0, 4)
    monkeypatch.setattr(upstream_mhc, "can_use_mega_mhc", lambda *arguments: False)
    given = Case("", {"T": 3, "D": 64, "aux": True}, OP.cases[0].make).inputs(1)
    given |= {"rms_eps": 0.1, "pre_eps": 0.2, "sinkhorn_eps": 0.3, "post_alpha": 1.7, "sinkhorn_iters": 3, "norm_eps": 0.4}
    got = upstream_mhc.mhc_shifted_post_pre(*(given[n] for n in ORDER), **{n: given[n] for n in NAMED})
    for ours, want in zip(got, OP.reference(**given), strict=True):
        assert torch.equal(ours, want)


@pytest.mark.parametrize("kernels, up_to, first, binaries", [
    ("", 4, 33, 9), ("", 0, 33, 6), ("", 0, 2049, 5), ("", 40, 3000, 9), ("mhc_post_pre=triton", 0, 257, 9), ("mhc_post_pre=upstream", 4, 33, 0),
])
def test_any_number_of_tokens_reaches_what_was_warmed(kernels, up_to, first, binaries, monkeypatch):
    rule(monkeypatch, kernels, up_to, first)
    function = OP.implementations[0].function
    with recorded_launches() as warmed:
        for call in BOUNDARY_KERNELS.get_warmup_keys(96):
            function(**call.inputs("cpu"))
    with recorded_launches() as served:
        for tokens in (*range(1, 70), 256, 257, 1024, 2048, 2049, 3000, 8192):
            for aux in (False, True) if mhc.serves(tokens) else ():
                given = Case("", {"T": tokens, "D": 96, "aux": aux}, OP.cases[0].make).inputs(0)
                streams, post, comb, _, pre, _ = function(**given)
                function(**given | {"streams": streams, "post": post, "comb": comb, "pre_mix": pre})  # the next boundary
    assert served == warmed and len(served) == binaries
