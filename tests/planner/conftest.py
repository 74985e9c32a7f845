# SPDX-License-Identifier: Apache-2.0
"""The released model, counted once for all tests of the planner."""

import pytest

pytest.importorskip("pydantic", reason="the planner needs pydantic")

from vllm.ampere.model_spec import ModelSpec  # noqa: E402
from vllm.ampere.planner.weights import WeightTable  # noqa: E402


@pytest.fixture(scope="session")
def table() -> WeightTable:
    return WeightTable(ModelSpec())
