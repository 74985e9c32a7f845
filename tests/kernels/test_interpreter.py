# SPDX-License-Identifier: Apache-2.0
"""Run `tests/interpreter` in a process whose Triton interprets its kernels."""

import os
import subprocess
import sys

import pytest
from tests.repo.checkout import ROOT

from vllm.ampere.kernels.launch import unavailable


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_kernels_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "tests/interpreter", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
