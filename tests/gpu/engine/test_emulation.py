# SPDX-License-Identifier: Apache-2.0
"""The switch itself: stock vLLM fails under it, the tripwires fire, and nothing newer is in what was compiled."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from .runs import OPTIONS, ROOT, alone, card, execute

pytestmark = pytest.mark.gpu
NEWER = re.compile(r"wgmma|cp\.async\.bulk|mbarrier|setmaxnreg|griddepcontrol|barrier\.cluster|e4m3|e5m2")
WIRES = """
import vllm.utils.import_utils
vllm.utils.import_utils.has_cutedsl = lambda: True  # the package is there in a usual installation
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
assert current_platform.get_device_capability() == (8, 0) and not current_platform.supports_fp8()
from vllm.models.deepseek_v4.common.ops.fused_indexer_q import fused_indexer_q_rope_quant
from vllm.models.deepseek_v41.common.ops.cache_utils import dequantize_and_gather_k_cache
from vllm.utils.deep_gemm import fp8_fp4_mqa_logits
from vllm.v1.attention.ops import flashmla
x = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype, device="cuda")
at = x(1, dtype=torch.int64)
calls = {
    "CuTeDSL query": lambda: fused_indexer_q_rope_quant(at, x(1, 32, 128), x(8, 64, dtype=torch.float32), x(1, 32), 1.0, 1.0),
    "CuTeDSL gather": lambda: dequantize_and_gather_k_cache(
        x(1, 4, 512), x(1, 64, 584, dtype=torch.uint8), at.int(), None, x(1, 1, dtype=torch.int32), 64, 0),
    "FlashMLA prefill": lambda: flashmla.flash_mla_sparse_fwd(),
    "FlashMLA decode": lambda: flashmla.flash_mla_with_kvcache(),
    "DeepGEMM": lambda: fp8_fp4_mqa_logits((x(1, 32, 128), None), (x(1, 128), x(1)), x(1, 32), at.int(), at.int(), 1),
}
for name, call in calls.items():
    try:
        call()
        print("SILENT", name)
    except Exception as error:
        print(type(error).__name__, name, "|", error)
"""


def _link(source, target):
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A copy of the installed vLLM with the series taken off by our own tool."""
    folder = tmp_path_factory.mktemp("stock")
    from importlib.util import find_spec

    source = Path(find_spec("vllm").origin).parent
    shutil.copytree(source, folder / "vllm", symlinks=True, copy_function=_link)
    code = execute([str(ROOT / "vllm_ampere.py"), "patches", "revert", str(folder)], folder / "revert.log", {})
    assert code == 0, (folder / "revert.log").read_text()
    return folder


@pytest.mark.skipif("card() < (8, 9)", reason="on an Ampere card nothing is emulated")
def test_stock_vllm_fails(stock, runs, tmp_path):
    """It builds the model and stops in the profiling forward: an FP8 cast that Triton lowers although it is never run."""
    job = {"checkpoint": str(runs.checkpoint("pinned")), "options": OPTIONS | {"enforce_eager": True}, "steps": alone(20),
           "output": str(tmp_path / "out.pt")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    env = {"PYTHONPATH": str(stock), "VLLM_AMPERE_ASSUME": "sm80", "VLLM_PLUGINS": "ampere_emulated"}
    code = execute([str(Path(__file__).with_name("job.py")), str(tmp_path / "job.json")], tmp_path / "log", env)
    log = (tmp_path / "log").read_text()
    assert code not in (0, None), log[-3000:]
    assert "fp8e4nv not supported in this architecture" in log, log[-3000:]
    assert "fused_inv_rope_fp8_quant" in log
    assert "profile_run" in log or "profile_cudagraph" in log or "determine_available_memory" in log or "dummy_run" in log


@pytest.mark.skipif("card() < (8, 9)", reason="on an Ampere card nothing is emulated")
def test_tripwires_fire(tmp_path):
    """Each kernel family that the newer card would run, CuTeDSL's as if its package were there."""
    code = execute(["-c", WIRES], tmp_path / "log", {"VLLM_AMPERE_ASSUME": "sm80"})
    log = (tmp_path / "log").read_text()
    assert code == 0, log[-3000:]
    assert re.findall(r"^TripwireError ([\w ]+) \|", log, re.M) == [
        "CuTeDSL query", "CuTeDSL gather", "FlashMLA prefill", "FlashMLA decode", "DeepGEMM"], log[-3000:]


@pytest.mark.reads("sm80")
def test_nothing_newer_was_compiled(runs):
    """Every Triton kernel of the run, upstream's too: no instruction that sm_80 lacks."""
    runs.result("sm80")
    found = list((runs.folder / "triton-sm80").rglob("*.ptx"))
    assert len(found) > 50
    newer = {path.name: sorted(set(NEWER.findall(path.read_text()))) for path in found if NEWER.search(path.read_text())}
    assert not newer
    runs.figures["PTX files without a newer instruction"] = len(found)
