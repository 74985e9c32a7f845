# SPDX-License-Identifier: Apache-2.0
"""The card for the checks that the interpreter shares."""

import pytest


@pytest.fixture
def device() -> str:
    """Where the checks that the interpreter shares run."""
    return "cuda"
