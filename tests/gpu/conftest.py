# SPDX-License-Identifier: Apache-2.0
"""The card: an Ampere one as it is, a newer one as if it were an A100, unless `VLLM_AMPERE_ASSUME` says otherwise."""

import os

import pytest
import torch

if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
    # Before anything is compiled.
    os.environ.setdefault("TRITON_OVERRIDE_ARCH", os.environ.setdefault("VLLM_AMPERE_ASSUME", "sm80"))


def pytest_report_header():
    if not torch.cuda.is_available():
        return "tests/gpu: no card"
    assumed = os.environ.get("VLLM_AMPERE_ASSUME")
    return f"tests/gpu: {assumed + ' code on ' if assumed else ''}{torch.cuda.get_device_name()}"


@pytest.fixture
def device() -> str:
    """Where the checks of compiled kernels run."""
    return "cuda"
