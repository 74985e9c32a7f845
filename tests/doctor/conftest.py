# SPDX-License-Identifier: Apache-2.0
"""A machine for each test, and one checkpoint for all."""

import pytest

pytest.importorskip("pydantic", reason="presets need pydantic")

from tests.doctor.machine import Machine  # noqa: E402
from vllm.ampere import upstream  # noqa: E402
from vllm.ampere.testing import tiny_checkpoint  # noqa: E402


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(upstream, "series_dir", lambda: made.series)
    return made


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small DeepSeek-V4.1 with an engram; to be copied before it is spoilt."""
    small = {"engram_vocab_size": 100, "engram_n_heads": 2, "n_routed_experts": 6, "dspark_n_routed_experts": 3}
    return tiny_checkpoint.write(tmp_path_factory.mktemp("checkpoint") / "whole", "sharp", **small)
