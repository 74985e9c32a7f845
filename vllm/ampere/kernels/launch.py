# SPDX-License-Identifier: Apache-2.0
"""Triton where it is installed, and the launches that the compile tier builds.

Kernel files take `triton` and `tl` from here. Without Triton both are a placeholder under which a kernel file still
imports; `unavailable` then tells the registry why no Triton implementation can be chosen.
"""

from dataclasses import dataclass, field
from typing import Any, Mapping

import torch


class _Placeholder:
    """Stands for a module: any attribute, any call; as a decorator it returns the function as it is."""

    def __getattr__(self, name: str):
        return self

    def __call__(self, function=None, **options):
        return self if function is None else function


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Placeholder()
    INSTALLED = False
else:
    INSTALLED = True
try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
except ImportError as error:
    gluon = gl = async_copy = mma_v2 = _Placeholder()
    _NO_GLUON = str(error)
else:
    _NO_GLUON = ""


def unavailable() -> str:
    """Why Triton cannot run in this process, or "" if it can."""
    return "" if INSTALLED else "triton is not installed"


def gluon_unavailable() -> str:
    """Why Gluon, Triton's language with explicit layouts, cannot run in this process, or "" if it can."""
    if missing := unavailable() or _NO_GLUON:
        return missing
    return "Triton's interpreter does not run Gluon" if triton.knobs.runtime.interpret else ""


def aligned_rows(like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Uninitialised [rows, width] of the dtype and device of `like`, whose rows start 16 elements apart or a multiple.

    Triton compiles a kernel again for a stride that 16 does not divide; the width of scores follows the context.
    """
    return like.new_empty(rows, -(-width // 16) * 16)[:, :width]


@dataclass(frozen=True)
class Launch:
    """One production launch of a kernel, as the compile tier builds it.

    Attributes:
        kernel: the jitted function.
        signature: argument name to type, for every argument that is not in `constexprs`: "*bf16", "*u8", "i32", "fp32".
            ":16" after it: a multiple of 16, as an aligned pointer or a stride is in a real launch.
        constexprs: argument name to value.
        num_warps, num_stages, fp_fusion: options of the launch; the defaults are Triton's.
        spill_bytes: bound on the bytes of registers spilled, stores and loads each.
        shared_reason: why the kernel takes more than 48 KiB of shared memory, or "".
        architectures: those that launch it.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    spill_bytes: int = 0
    shared_reason: str = ""
    architectures: tuple[str, ...] = ("sm80", "sm86")

    @property
    def name(self) -> str:
        """The kernel and its constants."""
        constants = "_".join(f"{key.lower()}{value}" for key, value in self.constexprs.items())
        return f"{self.kernel.__name__.strip('_')}-{constants or 'plain'}"
