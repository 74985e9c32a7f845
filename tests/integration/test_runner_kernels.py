# SPDX-License-Identifier: Apache-2.0
"""What the CPU engine runs in place of vLLM's Triton kernels, value for value, in a process that interprets those."""

import subprocess
import sys

import pytest

from vllm.ampere.testing.engine import environment

pytestmark = pytest.mark.vllm


def test_stand_ins_write_what_the_kernels_write():
    command = [sys.executable, "-m", "tests.integration.runner_kernels"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    equal = dict(line.split(": ") for line in run.stdout.splitlines() if line.endswith(" tensors equal"))
    assert set(equal) == {
        "apply_writes", "compressed_slots", "draft_inputs", "draft_window", "gather_block_tables", "gather_lens",
        "hash_ids", "slot_mappings", "token_logprobs", "token_ranks", "token_requests", "uniform_decode",
    }  # fmt: skip
    assert all(int(count.split()[0]) >= 6 for count in equal.values()), equal
