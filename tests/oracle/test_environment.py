# SPDX-License-Identifier: Apache-2.0
"""The oracle's environment: the kernels' references, without vLLM."""

import importlib.util

import pytest

from vllm.ampere.kernels.registry import all_ops


@pytest.mark.oracle
def test_kernels_work_without_vllm():
    assert importlib.util.find_spec("vllm.engine") is None
    assert "inverse_rope" in all_ops()
