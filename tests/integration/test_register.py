# SPDX-License-Identifier: Apache-2.0
"""What vLLM learns from our plugin."""

import os
import re
from types import SimpleNamespace

import pytest
from tests.repo.checkout import ROOT

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.envs import environment_variables
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform

from vllm.ampere import envs
from vllm.ampere.integration.cpu.platform import AmpereCpuPlatform
from vllm.ampere.integration.register import register


def test_our_variables_are_known_and_a_mistyped_one_is_not(monkeypatch):
    """vLLM warns of an unknown VLLM_ name, and with --fail-on-environ-validation stops."""
    register()
    for name in envs.OURS:
        monkeypatch.setenv(name, "set")
        assert environment_variables[name]() == "set"
    current_platform.validate_environ(hard_fail=True)
    monkeypatch.setenv("VLLM_AMPERE_KERNEL", "*=reference")
    with pytest.raises(ValueError, match="VLLM_AMPERE_KERNEL$"):
        current_platform.validate_environ(hard_fail=True)


def test_every_variable_that_is_read_or_described_is_in_the_table():
    sources = [path for folder in ("vllm", "docs") for kind in ("py", "md") for path in ROOT.glob(f"{folder}/**/*.{kind}")]
    named = {name for path in sources for name in re.findall(r"VLLM_AMPERE_[A-Z]+", path.read_text())}
    assert named == set(envs.OURS)


@pytest.mark.parametrize("asked, then", [("fork", "fork"), ("spawn", "spawn"), (None, "spawn")])
def test_processes_are_forked_on_a_cpu_if_asked(monkeypatch, asked, then):
    """vLLM's CPU platform sets "spawn", whatever was asked."""
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name) if asked is None else monkeypatch.setenv(name, asked)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", lambda config: os.environ.update({name: "spawn"}))
    given = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=1, async_scheduling=False),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
    )
    AmpereCpuPlatform.check_and_update_config(given)
    assert os.environ[name] == then
