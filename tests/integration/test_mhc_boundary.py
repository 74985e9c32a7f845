# SPDX-License-Identifier: Apache-2.0
"""Patch 0560: upstream's boundary serves unless another is asked for, which then gets the arguments by their names."""

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


@pytest.mark.parametrize("kernels, ours", [
    ("", False), ("markov_sampler=reference", False), ("mhc_post_pre=upstream", False), ("mhc_post_pre=reference", True)
])
def test_boundary_is_upstreams_unless_asked(kernels, ours, monkeypatch):
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", kernels)
    assert mhc.boundary(upstream) is (mhc.post_pre if ours else upstream)
    monkeypatch.setattr(gate, "architecture", lambda: None)
    assert mhc.boundary(upstream) is upstream


def test_ours_through_upstreams_function(monkeypatch):
    """The patched function of the model, with every number different from every other."""
    from vllm.models.deepseek_v41.nvidia.ops import mhc as upstream_mhc

    monkeypatch.setenv("VLLM_AMPERE_KERNELS", "mhc_post_pre=reference")
    monkeypatch.setattr(upstream_mhc, "can_use_mega_mhc", lambda *arguments: False)
    given = Case("", {"T": 3, "D": 64, "aux": True}, OP.cases[0].make).inputs(1)
    given |= {"rms_eps": 0.1, "pre_eps": 0.2, "sinkhorn_eps": 0.3, "post_alpha": 1.7, "sinkhorn_iters": 3, "norm_eps": 0.4}
    got = upstream_mhc.mhc_shifted_post_pre(*(given[n] for n in ORDER), **{n: given[n] for n in NAMED})
    for ours, want in zip(got, OP.reference(**given), strict=True):
        assert torch.equal(ours, want)


def test_any_number_of_tokens_reaches_what_was_warmed():
    function = OP.implementations[0].function
    with recorded_launches() as warmed:
        for call in BOUNDARY_KERNELS.get_warmup_keys(96):
            function(**call.inputs("cpu"))
    with recorded_launches() as served:
        for tokens in (*range(1, 70), 256, 257, 1024, 2048, 2049, 8192):
            for aux in (False, True):
                function(**Case("", {"T": tokens, "D": 96, "aux": aux}, OP.cases[0].make).inputs(0))
    assert served == warmed and len(served) == 11
