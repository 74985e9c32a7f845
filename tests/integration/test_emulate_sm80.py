# SPDX-License-Identifier: Apache-2.0
"""The switch and the tripwires, as far as they go without a card; tests/gpu/engine has the rest."""

import importlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.ampere.errors import SelectionError
from vllm.ampere.integration import emulate_sm80

IMPORTS = """
from vllm.ampere.integration.emulate_sm80 import tripwires
tripwires.install()
tripwires.install()
import importlib, sys
assert sum(type(finder) is tripwires._Finder for finder in sys.meta_path) == 1
from vllm.utils import deep_gemm
from vllm.v1.attention.ops import flashmla
calls = [deep_gemm._lazy_init, flashmla.flash_mla_sparse_fwd, flashmla.flash_mla_with_kvcache]
names = ("vllm.models.deepseek_v4.nvidia.ops.fused_indexer_q_cutedsl", "vllm.models.deepseek_v41.nvidia.ops.cute_dsl.primitives")
calls += [lambda name=name: importlib.import_module(name) for name in names]
for call in calls:
    try:
        call()
    except tripwires.TripwireError as error:
        print(error)
import vllm.model_executor.warmup.cutedsl_warmup  # it compiles nothing where no kernel registered
"""


def test_nothing_happens_unless_asked(monkeypatch):
    monkeypatch.delenv("VLLM_AMPERE_ASSUME", raising=False)
    assert emulate_sm80.detect() is None
    emulate_sm80.install()
    assert not [finder for finder in sys.meta_path if type(finder).__module__.endswith("tripwires")]


def test_without_a_card_it_says_so(monkeypatch):
    monkeypatch.setenv("VLLM_AMPERE_ASSUME", "sm80")
    with pytest.raises(SelectionError, match="no NVIDIA card"):
        emulate_sm80.detect()


def test_triton_is_told_and_contradictions_are_refused(monkeypatch):
    import vllm.platforms

    monkeypatch.setitem(vllm.platforms.builtin_platform_plugins, "cuda", lambda: "a card")
    monkeypatch.setenv("VLLM_AMPERE_ASSUME", "sm86")
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm90")
    with pytest.raises(SelectionError, match="sm90 contradicts .*sm86"):
        emulate_sm80.detect()
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm86")
    module, name = emulate_sm80.detect().rsplit(".", 1)
    assert importlib.util.find_spec(module) and name == "EmulatedPlatform"


def test_tripwires_fire():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 5 and all("has no Ampere build" in line for line in lines), lines
