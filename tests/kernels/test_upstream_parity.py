# SPDX-License-Identifier: Apache-2.0
"""The references against the Triton kernels of the pinned upstream, interpreted on the CPU, byte for byte."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.vllm
def test_references_equal_upstream_kernels():
    script = pathlib.Path(__file__).with_name("upstream_kernels.py")
    # vLLM hides Triton where it sees no GPU, unless told that the devices are masked.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    equal = dict(line.split(": ") for line in run.stdout.splitlines() if line.endswith(" tensors equal"))
    assert set(equal) == {
        "combine_topk_swa", "compressor_pool", "compressor_insert", "gather_dequant", "topk_slots", "window_slots"
    }  # fmt: skip
    assert all(int(count.split()[0]) >= 2 for count in equal.values())
