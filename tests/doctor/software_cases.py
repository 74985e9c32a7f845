# SPDX-License-Identifier: Apache-2.0
"""Areas 3 and 4: what makes each code fire, and what is near it and must not."""

import json
import shutil

from tests.doctor.expected import (
    FAIL, OK, UNKNOWN, WARN, Expected, attributes, both, package, remove, variables, write,
)  # fmt: skip
from tests.doctor.machine import TOOLKIT
from vllm.ampere.patching import transaction
from vllm.ampere.patching.tree import OVERLAY

TOOLKIT_PACKAGES = {
    "nvidia_cuda_nvcc": "13.0.88", "nvidia_cuda_crt": "13.0.88", "nvidia_nvvm": "13.0.88",
    "nvidia_cuda_cccl": "13.0.85", "nvidia_cuda_runtime": "13.0.96",
}  # fmt: skip


def torch_built(version: str, cuda: str):
    def change(machine):
        machine.package("torch", version)
        (machine.site / "torch/version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\n")

    return change


def toolkit_from_pip(**versions: str):
    """No toolkit but the pip packages, as a GPU machine has them after `pip install vllm`."""

    def change(machine):
        shutil.rmtree(machine.root / "usr/local/cuda")
        for name, version in (TOOLKIT_PACKAGES | versions).items():
            machine.package(name, version)

    return change


def no_vllm(machine):
    shutil.rmtree(machine.site / "vllm")


def unanswered(machine):
    """The driver is loaded and nvidia-ml-py is missing: its version is in a file."""
    machine.driver = ""


def old_driver_file(machine):
    unanswered(machine)
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (builder@host)\n"
    machine.write("/proc/driver/nvidia/version", text)


SOFTWARE = [
    Expected("AMP301", FAIL, "no vLLM is installed", no_vllm),
    Expected("AMP302", FAIL, "0.32.1, the patches are for 0.33.0", package("vllm", "0.32.1")),
    Expected("AMP302", OK, "vLLM 0.33.0+cu130", package("vllm", "0.33.0+cu130")),
    Expected("AMP302", UNKNOWN, "no installed distribution", package("vllm", None)),
    Expected("AMP303", WARN, "triton 3.9.0 (for 3.8.0)", package("triton", "3.9.0")),
    Expected("AMP303", WARN, "tilelang is missing (for 0.1.12)", package("tilelang", None)),
    Expected("AMP303", UNKNOWN, "neither PyTorch nor Triton", attributes(search_path=[])),
    Expected("AMP304", FAIL, "PyTorch 2.14.0+cpu is built for the CPU", torch_built("2.14.0+cpu", "None")),
    Expected("AMP304", WARN, "built for CUDA 12.9, the pinned one for 13.0", torch_built("2.14.0+cu129", "'12.9'")),
    Expected("AMP304", UNKNOWN, "not installed", package("torch", None)),
    Expected("AMP305", FAIL, "driver 570.86.15 serves CUDA 12.8, PyTorch is built for CUDA 13.0",
             attributes(driver="570.86.15", cuda=(12, 8))),
    Expected("AMP305", OK, "serves CUDA 12.8",
             both(attributes(driver="570.86.15", cuda=(12, 8)), torch_built("2.14.0+cu129", "'12.9'"))),
    Expected("AMP305", FAIL, "driver 570, PyTorch is built for CUDA 13.0", old_driver_file),
    Expected("AMP305", OK, "driver 580", unanswered),
    Expected("AMP305", UNKNOWN, "/proc/driver/nvidia/version", both(unanswered, remove("/proc/driver"))),
    Expected("AMP306", FAIL, "nvidia-cuda-nvcc 13.5.12 in the pip packages, but nvidia-cuda-cccl 13.0.85, "
             "nvidia-cuda-runtime 13.0.96",
             toolkit_from_pip(nvidia_cuda_nvcc="13.5.12", nvidia_cuda_crt="13.5.12", nvidia_nvvm="13.5.12")),
    Expected("AMP306", OK, "nvidia-cuda-nvcc 13.0.88", toolkit_from_pip()),
    Expected("AMP306", FAIL, "cuda_nvcc 13.5.12 in /usr/local/cuda, but cuda_cccl 13.0.88",
             write("/usr/local/cuda/version.json", json.dumps(TOOLKIT | {"cuda_nvcc": {"version": "13.5.12"}}))),
    Expected("AMP306", FAIL, "nvidia-cuda-nvcc 13.5.12 in /opt/nvidia/cu13, but nvidia-cuda-crt 13.0.88",
             both(toolkit_from_pip(nvidia_cuda_nvcc="13.5.12"), variables(CUDA_HOME="/opt/nvidia/cu13"))),
    Expected("AMP306", UNKNOWN, "/opt/cuda does not say its version", variables(CUDA_HOME="/opt/cuda")),
    Expected("AMP306", UNKNOWN, "does not say its version", write("/usr/local/cuda/version.json", "[]")),
    Expected("AMP306", UNKNOWN, "no CUDA toolkit", remove("/usr/local/cuda")),
    Expected("AMP307", FAIL, "missing: gcc", remove("/usr/bin/gcc")),
    Expected("AMP307", FAIL, "missing: nvcc", remove("/usr/local/cuda")),
    Expected("AMP307", FAIL, "missing: nvcc", variables(CUDA_HOME="/opt/cuda")),
    Expected("AMP307", OK, "a C compiler", both(remove("/usr/bin/gcc"), variables(CC="/opt/bin/cc"))),
    Expected("AMP307", OK, "nvcc of the pip packages", toolkit_from_pip()),
    Expected("AMP308", WARN, "TRITON_INTERPRET=1, VLLM_AMPERE_ASSUME=sm86",
             variables(TRITON_INTERPRET="1", VLLM_AMPERE_ASSUME="sm86")),
    Expected("AMP308", WARN, "VLLM_AMPERE_KERNELS=*=reference", variables(VLLM_AMPERE_KERNELS="*=reference")),
    Expected("AMP308", OK, "no variable", variables(TRITON_INTERPRET="0", VLLM_AMPERE_KERNELS="inverse_rope=triton")),
]


def hollow(machine):
    (machine.site / "vllm/__init__.py").unlink()
    (machine.site / "vllm/model.py").unlink()


def edited(text: str | None):
    def change(machine):
        file = machine.site / "vllm/model.py"
        file.unlink() if text is None else file.write_text(text)

    return change


def half_applied(machine):
    """A second file of the series, still upstream's."""
    patch = machine.series / "0020-model-other.patch"
    patch.write_bytes((machine.series / "0010-model-hook.patch").read_bytes().replace(b"model.py", b"other.py"))
    (machine.series / "series").write_text("0010-model-hook.patch\n0020-model-other.patch\n")
    hashes = json.loads((machine.series / "hashes.json").read_text())
    hashes["files"]["vllm/other.py"] = hashes["files"]["vllm/model.py"]
    (machine.series / "hashes.json").write_text(json.dumps(hashes))
    (machine.site / "vllm/other.py").write_text("one\ntwo\n")


def interrupted(machine):
    """A journal is there: a run that was killed."""
    (machine.site / transaction.JOURNAL).mkdir()


def no_series(machine):
    shutil.rmtree(machine.series)


def another_tree(first: bool):
    def change(machine):
        other = machine.site.parent / "checkout"
        (other / "vllm").mkdir(parents=True)
        (other / "vllm/__init__.py").write_text("")
        machine.search_path = [other, machine.site] if first else [machine.site]
        machine.working_folder = other

    return change


def hollow_neighbour(machine):
    """A folder vllm without __init__.py hides nothing."""
    (machine.site.parent / "checkout/vllm/ampere").mkdir(parents=True)
    machine.search_path = [machine.site.parent / "checkout", machine.site]


def overlay(state: str):
    def change(machine):
        there = machine.site / "vllm/ampere"
        there.unlink()
        if state != "none":
            shutil.copytree(OVERLAY, there, ignore=shutil.ignore_patterns("__pycache__", "_shipped"))
        if state == "other":
            (there / "errors.py").write_text("")

    return change


OVERLAY_CASES = [
    Expected("AMP401", FAIL, "vllm has no __init__.py and holds ampere", hollow),
    Expected("AMP401", UNKNOWN, "no folder vllm", no_vllm),
    Expected("AMP402", FAIL, "partly applied: 1 of 2 files", half_applied),
    Expected("AMP402", FAIL, "interrupted: 1 of 1 files", interrupted),
    Expected("AMP402", OK, "not applied", edited("one\ntwo\n")),
    Expected("AMP402", UNKNOWN, "not recognised", edited("one\nmy own hook\ntwo\n")),
    Expected("AMP402", UNKNOWN, "no vLLM is installed", no_vllm),
    Expected("AMP402", UNKNOWN, "holds no series", no_series),
    Expected("AMP403", FAIL, "vllm/model.py is neither vLLM 0.33.0's nor the patched one", edited("one\nmine\ntwo\n")),
    Expected("AMP403", FAIL, "vllm/model.py is missing", edited(None)),
    Expected("AMP403", OK, "upstream's or patched", half_applied),
    Expected("AMP404", FAIL, "no patch is on", edited("one\ntwo\n")),
    Expected("AMP404", UNKNOWN, "partly applied", half_applied),
    Expected("AMP405", WARN, "checkout/vllm hides", another_tree(first=True)),
    Expected("AMP405", WARN, "from `python -m` and `python -c` in this folder", another_tree(first=False)),
    Expected("AMP405", OK, "one vLLM", hollow_neighbour),
    Expected("AMP406", FAIL, "has no overlay", overlay("none")),
    Expected("AMP406", FAIL, "vllm/ampere/errors.py differs", overlay("other")),
    Expected("AMP406", OK, "equals this command's overlay", overlay("copy")),
    Expected("AMP407", FAIL, "VLLM_PLUGINS=lora leaves the plugin ampere out", variables(VLLM_PLUGINS="lora")),
    Expected("AMP407", FAIL, "VLLM_PLUGINS= leaves", variables(VLLM_PLUGINS="")),
    Expected("AMP407", FAIL, "VLLM_PLUGINS=lora, ampere leaves", variables(VLLM_PLUGINS="lora, ampere")),
    Expected("AMP407", OK, "finds the plugin", variables(VLLM_PLUGINS="lora,ampere")),
    Expected("AMP407", WARN, "no installed package has the plugin", package("vllm_ampere", "0.1.0")),
]
