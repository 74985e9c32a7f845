# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton's interpreter, which a process enters by its environment before it imports Triton."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ACTIVE = os.environ.get("TRITON_INTERPRET") == "1"

if ACTIVE:
    from vllm.ampere.testing.interpreter import repair

    repair()


def pytest_collection_modifyitems(items):
    for item in items:
        if not ACTIVE and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="run by tests/kernels/test_interpreter.py"))


@pytest.fixture
def device() -> str:
    """Where the checks that a card shares run."""
    return "cpu"
