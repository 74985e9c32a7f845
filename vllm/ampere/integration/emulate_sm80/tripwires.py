# SPDX-License-Identifier: Apache-2.0
"""Raise, by name, when code that has no Ampere build is reached on a newer card that would run it.

An FP8 type in a Triton kernel needs no wire: Triton refuses it when it lowers for sm_80.
"""

import importlib
import importlib.abc
import sys

FLASHMLA = "vllm.v1.attention.ops.flashmla"
DEEPGEMM = "vllm.utils.deep_gemm"
# Modules that bind FlashMLA's functions by name, if they were imported before the wires went up.
_USERS = ("vllm.models.deepseek_v41.nvidia.flashmla", "vllm.v1.attention.backends.mla.flashmla_sparse")
_LAUNCHES = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache")


class TripwireError(RuntimeError):
    """Code without an Ampere build was reached."""


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("vllm.") and (name.endswith("_cutedsl") or ".cute_dsl." in name):
            raise TripwireError(f"import of {name}, which has no Ampere build")
        return None


def _wire(what: str):
    def hit(*args, **kwargs):
        raise TripwireError(f"call of {what}, which has no Ampere build")

    return hit


def install() -> None:
    """Put the wires up, once a process. Every name replaced must exist: another vLLM would leave a wire loose."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    _replace(DEEPGEMM, "_lazy_init", _wire("DeepGEMM"))
    for module in (FLASHMLA, *filter(sys.modules.__contains__, _USERS)):
        for name in _LAUNCHES:
            _replace(module, name, _wire(f"FlashMLA's {name}"))


def _replace(module: str, name: str, value) -> None:
    loaded = importlib.import_module(module)
    getattr(loaded, name)
    setattr(loaded, name, value)
