# SPDX-License-Identifier: Apache-2.0
"""Marlin's experts as vLLM calls them: the same rows give the same bits in every run."""

import importlib.util

import pytest
import torch

from vllm.ampere import arch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not importlib.util.find_spec("vllm.v1"), reason="vLLM is not installed in this Python")]
EXPERTS, CHOSEN, HIDDEN, WIDTH = 16, 6, 512, 256


def given(tokens: int) -> dict:
    """Arguments of `fused_marlin_moe`: random codes are weights in Marlin's layout too, whichever they are."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    def codes(*shape):
        return torch.randint(-(2**31), 2**31 - 1, shape, device="cuda").int()

    def scales(*shape):
        return torch.randint(118, 122, shape, device="cuda").to(torch.uint8).view(torch.float8_e8m0fnu)

    torch.manual_seed(tokens)
    return {
        "hidden_states": torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16),
        "w1": codes(EXPERTS, HIDDEN // 16, 4 * WIDTH), "w2": codes(EXPERTS, WIDTH // 16, 2 * HIDDEN),
        "bias1": None, "bias2": None,
        "w1_scale": scales(EXPERTS, HIDDEN // 32, 2 * WIDTH), "w2_scale": scales(EXPERTS, WIDTH // 32, HIDDEN),
        "topk_weights": torch.rand(tokens, CHOSEN, device="cuda"),
        "topk_ids": torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :CHOSEN].int(),
        "quant_type_id": scalar_types.float4_e2m1f.id, "workspace": marlin_make_workspace_new(torch.device("cuda"), 4),
    }  # fmt: skip


@pytest.mark.parametrize("tokens", [7, 100, 512, 2048])
def test_same_bits_in_every_run(tokens, monkeypatch):
    """50 runs; beside them, what upstream's order does is printed, not judged: it may be the same by luck."""
    from vllm.ampere.integration import gate
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe

    arguments = given(tokens)
    unlike = {}
    for name, architecture in (("upstream's order", None), ("ordered", arch.of_device("cuda"))):
        monkeypatch.setattr(gate, "architecture", lambda architecture=architecture: architecture)
        first = fused_marlin_moe(**arguments)
        assert first.isfinite().all() and first.any()
        unlike[name] = sum(not torch.equal(fused_marlin_moe(**arguments), first) for _ in range(50))
    print(f"{tokens} tokens: runs unlike the first {unlike}")
    assert unlike["ordered"] == 0
