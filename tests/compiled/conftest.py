# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of our kernels, run on the CPU by `testing.ptx_machine`.

Where the interpreter runs a kernel's Python, this runs its PTX for sm_80, layouts, barriers and asynchronous copies included,
and raises on a race or an access outside the tensors. `tests/gpu` runs the same properties on a card.
"""

import pytest

from vllm.ampere.kernels.launch import gluon_unavailable
from vllm.ampere.testing import ptx_launch


@pytest.fixture
def device() -> str:
    """Where the checks that a card shares run."""
    return "cpu"


@pytest.fixture(autouse=True)
def compiled():
    """Every kernel that a test launches runs as compiled."""
    if reason := gluon_unavailable():
        pytest.skip(reason)
    with ptx_launch.on_the_cpu():
        yield
