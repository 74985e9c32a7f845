# SPDX-License-Identifier: Apache-2.0
"""Area 3: versions, compilers and variables, read from metadata and files; nothing is imported."""

import json
import re
import shutil
from pathlib import Path

from .. import upstream
from .case import Case
from .findings import Outcome, Unknown, fail, ok, warn
from .system import System

_PINNED = ("torch", "triton", "tilelang", "transformers")
# The least driver of each CUDA's major version.
_DRIVERS = {12: 525, 13: 580}
# What the pip packages of one CUDA toolkit are called; the first brings the compiler.
_TOOLKIT = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
# The same parts as a toolkit's version.json calls them.
_PARTS = ("cuda_nvcc", "cuda_cccl", "cuda_cudart")
# Variables that make a test of a server: value, or None for any.
_TEST_VARIABLES = {
    "TRITON_INTERPRET": "1",
    "TRITON_OVERRIDE_ARCH": None,
    "VLLM_AMPERE_ASSUME": None,
    "VLLM_AMPERE_PLATFORM": "cpu",
    "CUDA_LAUNCH_BLOCKING": "1",
    "TILELANG_DISABLE_CACHE": "1",
}


def _installed(case: Case) -> Outcome:
    tree = case.system.tree
    return ok(f"vLLM is in {tree}") if tree else fail("no vLLM is installed where this Python looks")


def _release(case: Case) -> Outcome:
    found, wanted = case.system.version("vllm"), upstream.version()
    if found is None:
        raise Unknown("no installed distribution is called vllm")
    seen = f"vLLM {found}"
    return ok(seen) if _plain(found) == wanted else fail(f"{seen}, the patches are for {wanted}")


def _pins(case: Case) -> Outcome:
    pins = upstream.pins()["cpu" if _is_cpu_build(case.system) else "production"]
    found = {name: case.system.version(name) for name in _PINNED if name in pins}
    if not any(found.values()):
        raise Unknown("neither PyTorch nor Triton is installed where this Python looks")
    other = [
        f"{name} {version or 'is missing'} (for {pins[name]})"
        for name, version in found.items() if _plain(version or "") != _plain(pins[name])
    ]
    return warn(", ".join(other)) if other else ok(", ".join(f"{name} {version}" for name, version in found.items()))


def _torch_build(case: Case) -> Outcome:
    version = case.system.version("torch")
    if version is None:
        raise Unknown("PyTorch is not installed where this Python looks")
    if _is_cpu_build(case.system):
        seen = f"PyTorch {version} is built for the CPU"
        return fail(seen) if case.system.driver_is_loaded else ok(f"{seen}, and there is no card")
    built, wanted = _torch_cuda(case.system), upstream.pins()["production"]["cuda"]
    seen = f"PyTorch {version} is built for CUDA {built}"
    return ok(seen) if built == wanted else warn(f"{seen}, the pinned one for {wanted}")


def _driver(case: Case) -> Outcome:
    try:
        wanted = _torch_cuda(case.system)
    except Unknown:
        wanted = upstream.pins()["production"]["cuda"]
    major = int(wanted.partition(".")[0])
    try:
        driver = case.system.driver
        seen, enough = f"driver {driver.version} serves CUDA {'.'.join(map(str, driver.cuda))}", driver.cuda[0] >= major
    except Unknown:
        version = re.search(r"Kernel Module.*?\s(\d+)\.\d", case.system.read("/proc/driver/nvidia/version"))
        if not version or major not in _DRIVERS:
            raise
        seen, enough = f"driver {version[1]}", int(version[1]) >= _DRIVERS[major]
    return ok(seen) if enough else fail(f"{seen}, PyTorch is built for CUDA {wanted}")


def _toolkit(case: Case) -> Outcome:
    home, parts = _toolkit_parts(case.system)
    if not parts:
        raise Unknown(f"{home} does not say its version" if home else "there is no CUDA toolkit")
    compiler, *others = parts.items()
    wrong = [f"{name} {version}" for name, version in others if _minor(version) != _minor(compiler[1])]
    seen = f"{compiler[0]} {compiler[1]} in {home}"
    return fail(f"{seen}, but {', '.join(wrong)}") if wrong else ok(seen)


def _toolkit_parts(system: System) -> tuple[str, dict[str, str]]:
    """The toolkit that TileLang takes, in its order: CUDA_HOME, nvcc on PATH, the pip packages, /usr/local/cuda."""
    named = system.variables.get("CUDA_HOME") or system.variables.get("CUDA_PATH")
    on_path = _program(system, "nvcc")
    if named or on_path:
        home = named or str(Path(on_path).parent.parent)
    elif system.version(_TOOLKIT[0]) or not system.at("/usr/local/cuda").exists():
        home = ""
    else:
        home = "/usr/local/cuda"
    if not home or re.search(r"/nvidia/cu\d+$", str(system.at(home).resolve())):
        found = {name: version for name in _TOOLKIT if (version := system.version(name))}
        return home or "the pip packages" * bool(found), found if _TOOLKIT[0] in found else {}
    try:
        listed = json.loads(system.read(f"{home}/version.json"))
        return home, {name: listed[name]["version"] for name in _PARTS if _PARTS[0] in listed and name in listed}
    except (Unknown, ValueError, TypeError, KeyError):
        return home, {}


def _compilers(case: Case) -> Outcome:
    system = case.system
    home, _ = _toolkit_parts(system)
    compiler = system.variables.get("CC") or any(_program(system, name) for name in ("gcc", "clang", "cc"))
    missing = [] if compiler else ["gcc"]
    if not home or not home.startswith("the pip") and not system.at(f"{home}/bin/nvcc").exists():
        missing.append("nvcc")
    return fail(f"missing: {', '.join(missing)}") if missing else ok(f"a C compiler, and nvcc of {home}")


def _variables(case: Case) -> Outcome:
    variables = case.system.variables
    found = [
        f"{name}={variables[name]}" for name, value in _TEST_VARIABLES.items()
        if variables.get(name) and value in (None, variables[name])
    ]
    if "*=reference" in variables.get("VLLM_AMPERE_KERNELS", ""):
        found.append("VLLM_AMPERE_KERNELS=*=reference")
    return warn(", ".join(found)) if found else ok("no variable of a test is set")


def _program(system: System, name: str) -> str | None:
    folders = [str(system.at(folder)) for folder in system.variables.get("PATH", "").split(":") if folder]
    found = shutil.which(name, path=":".join(folders))
    return "/" + str(Path(found).relative_to(system.root)) if found else None


def _is_cpu_build(system: System) -> bool:
    return "+cpu" in (system.version("torch") or "")


def _torch_cuda(system: System) -> str:
    found = re.search(r"^cuda\b.*= '([\d.]+)'", system.packaged("torch", "torch/version.py"), re.MULTILINE)
    if not found:
        raise Unknown("torch/version.py names no CUDA")
    return found[1]


def _plain(version: str) -> str:
    """Without the build's name: 2.14.0 of 2.14.0+cu130."""
    return version.partition("+")[0]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


CHECKS = {
    "AMP301": _installed,
    "AMP302": _release,
    "AMP303": _pins,
    "AMP304": _torch_build,
    "AMP305": _driver,
    "AMP306": _toolkit,
    "AMP307": _compilers,
    "AMP308": _variables,
}
