# SPDX-License-Identifier: Apache-2.0
"""The references against the Triton kernels of the pinned upstream, interpreted on the CPU, byte for byte."""

import os
import pathlib
import subprocess
import sys

import pytest


def interpreted(script: str) -> str:
    """What a script beside this file prints; it must end well."""
    path = pathlib.Path(__file__).with_name(script)
    paths = os.pathsep.join([str(path.parents[2]), os.environ.get("PYTHONPATH", "")])
    # vLLM hides Triton where it sees no GPU, unless told that the devices are masked.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    run = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.vllm
def test_references_equal_upstream_kernels():
    said = interpreted("upstream_kernels.py")
    equal = dict(line.split(": ") for line in said.splitlines() if line.endswith(" tensors equal"))
    assert set(equal) == {
        "combine_topk_swa", "compressor_pool", "compressor_insert", "gather_dequant", "topk_slots", "window_slots"
    }  # fmt: skip
    assert all(int(count.split()[0]) >= 2 for count in equal.values())


@pytest.mark.vllm
def test_drafts_equal_upstreams_loop():
    lines = interpreted("upstream_draft_loop.py").splitlines()
    said = dict(line.split(": ") for line in lines if " requests equal" in line)
    assert {name: int(count.split()[0]) for name, count in said.items()} == {
        "greedy reference": 10_000, "greedy triton-inside": 10_000, "greedy triton": 200, "noise": 32,
    }  # fmt: skip


@pytest.mark.vllm
def test_upstreams_router_gives_image_tokens_their_own_bias():
    assert "router: 45 image tokens equal" in interpreted("upstream_router.py")
