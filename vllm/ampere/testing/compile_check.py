# SPDX-License-Identifier: Apache-2.0
"""Compile Triton kernels for Ampere without a card, and read what they need of it.

Triton's front end refuses fp8e4nv for these targets by itself; it does not check shared memory or spills.
"""

import importlib
import pkgutil
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from .. import arch, kernels
from ..kernels.launch import Launch

SHARED_BYTES_UNLISTED = 49_152


@dataclass(frozen=True)
class Built:
    """One kernel, built for one architecture.

    Attributes:
        ptx: its assembly.
        shared_bytes: dynamic shared memory of one program.
        registers: of one thread, 32 bits each.
        spill_store_bytes, spill_load_bytes: of one thread, as ptxas counts them.
        layouts: Triton's program with the layout of every tensor (TTGIR).
    """

    ptx: str
    shared_bytes: int
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    layouts: str = ""


def all_launches() -> list[Launch]:
    """The `COMPILES` of every module below `kernels`."""
    modules = pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")
    return [launch for m in modules for launch in getattr(importlib.import_module(m.name), "COMPILES", ())]


def build(launch: Launch, architecture: str) -> Built:
    """Compile a launch for "sm80" or "sm86".

    Raises:
        triton.compiler.errors.CompilationError: the architecture lacks something that the kernel uses.
    """
    names = launch.kernel.arg_names
    unknown = (launch.signature.keys() | launch.constexprs.keys()) ^ set(names)
    assert not unknown, f"{launch.name}: arguments in one of kernel and launch only: {sorted(unknown)}"
    types = {n: launch.signature.get(n, "constexpr") for n in names}
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": launch.fp_fusion}
    built = compiled(launch.kernel, types, dict(launch.constexprs), options, architecture)
    needs = _assemble(built.asm["ptx"], architecture, launch.fp_fusion)
    return Built(built.asm["ptx"], built.metadata.shared, *needs, built.asm["ttgir"])


def compiled(kernel, types: Mapping[str, str], constexprs: Mapping[str, Any], options: Mapping[str, Any], architecture: str):
    """Triton's compiled kernel: `asm` by stage, and `metadata`.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`.
        types: of every argument in order, as in `Launch.signature`, or "constexpr".
        constexprs: argument name to value.
        options: of the launch.
        architecture: "sm80" or "sm86".
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    described = source(
        fn=kernel,
        signature={n: t.removesuffix(":16") for n, t in types.items()},
        constexprs=dict(constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.endswith(":16")},
    )
    target = GPUTarget("cuda", int(architecture.removeprefix("sm")), 32)
    return triton.compile(described, target=target, options=dict(options))


def ptxas() -> Path:
    """The assembler of Triton's wheel."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


def _assemble(ptx: str, architecture: str, fp_fusion: bool) -> tuple[int, int, int]:
    """(registers, spill stores, spill loads) that ptxas reports."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = [f"--gpu-name=sm_{architecture.removeprefix('sm')}", *([] if fp_fusion else ["--fmad=false"])]
        command = [ptxas(), "-v", *options, source, "-o", source.with_suffix(".cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    registers, stores, loads = (int(re.search(pattern, report)[1]) for pattern in patterns)
    return registers, stores, loads


def faults(launch: Launch, built: Built, architecture: str) -> list[str]:
    """What keeps a built kernel from being served: nothing, or one line each."""
    limit = arch.ARCHITECTURES[architecture].shared_bytes_per_block
    found = []
    if built.shared_bytes > limit:
        found.append(f"{built.shared_bytes} bytes of shared memory, {architecture} has {limit}")
    elif built.shared_bytes > SHARED_BYTES_UNLISTED and not launch.shared_reason:
        limit = SHARED_BYTES_UNLISTED
        found.append(f"{built.shared_bytes} bytes of shared memory, over {limit} without a listed reason")
    spilled = max(built.spill_store_bytes, built.spill_load_bytes)
    if spilled > launch.spill_bytes:
        found.append(f"{spilled} bytes of registers spilled, {launch.spill_bytes} listed")
    if re.search(r"\.e[45]m[23]x2|wgmma|cp\.async\.bulk", built.ptx):
        found.append("an instruction that Ampere lacks")
    return found
