# SPDX-License-Identifier: Apache-2.0
"""Every environment variable that this package reads, in one table."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import SelectionError

OURS = (
    "VLLM_AMPERE_ASSUME",
    "VLLM_AMPERE_CHAT",
    "VLLM_AMPERE_KERNELS",
    "VLLM_AMPERE_PLATFORM",
    "VLLM_AMPERE_TRACE",
    "VLLM_AMPERE_TRACEBACK",
)


def readers() -> dict[str, Callable[[], str | None]]:
    """What reads each variable of `OURS`, in the form of vLLM's own table."""
    return {name: functools.partial(os.environ.get, name) for name in OURS}


def kernels() -> dict[str, str]:
    """`VLLM_AMPERE_KERNELS`: implementations asked for by name, as "op=name,op=name" ("*" is every op).

    Unset or empty: each op takes the best implementation that runs here. An entry that cannot be
    honoured raises when the op is chosen.

    Raises:
        SelectionError: an entry without "=".
    """
    asked = os.environ.get("VLLM_AMPERE_KERNELS", "")
    return _pairs("VLLM_AMPERE_KERNELS", asked, '"op=name", or "*=reference" for all')


def chat() -> dict[str, str]:
    """`VLLM_AMPERE_CHAT`: open points of the chat format to take otherwise, as "name=value,name=value".

    `integration/chat/choices.py` has the names.

    Raises:
        SelectionError: an entry without "=".
    """
    return _pairs("VLLM_AMPERE_CHAT", os.environ.get("VLLM_AMPERE_CHAT", ""), '"name=value"')


@functools.cache
def _pairs(variable: str, value: str, form: str) -> dict[str, str]:
    """Entries of a variable, read once for each value that it has: every call of an op asks."""
    entries = [entry.strip() for entry in value.split(",") if entry.strip()]
    for entry in entries:
        if "=" not in entry:
            raise SelectionError(f"{variable} has {entry!r}", f"write it as {form}")
    return dict(entry.split("=", 1) for entry in entries)


def assumed_architecture() -> str:
    """`VLLM_AMPERE_ASSUME`: "sm80" or "sm86"; CUDA devices count as that architecture. Unset or empty: as what they are.

    For tests on a newer card, together with Triton's `TRITON_OVERRIDE_ARCH`.

    Raises:
        SelectionError: another name.
    """
    name = os.environ.get("VLLM_AMPERE_ASSUME", "")
    if name not in ("", "sm80", "sm86"):
        raise SelectionError(f"VLLM_AMPERE_ASSUME is {name!r}", "set it to sm80 or sm86, or leave it unset")
    return name


def platform() -> str:
    """`VLLM_AMPERE_PLATFORM`: "auto" (default) or "cpu".

    "auto" leaves the choice to vLLM where it finds a GPU, and takes the reference CPU platform where
    it finds none; "cpu" takes the CPU platform in any case.
    """
    return os.environ.get("VLLM_AMPERE_PLATFORM", "auto")


@contextlib.contextmanager
def forks() -> Iterator[None]:
    """`VLLM_WORKER_MULTIPROC_METHOD=fork`, a variable of vLLM's, survives the code inside, which sets "spawn"."""
    asked = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    yield
    if asked == "fork":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = asked


def trace_path() -> str:
    """`VLLM_AMPERE_TRACE`: file that receives one JSON line per traced event; unset or empty is off."""
    return os.environ.get("VLLM_AMPERE_TRACE", "")


def traceback() -> bool:
    """`VLLM_AMPERE_TRACEBACK`: "1" makes the command line show the traceback of a fault of ours."""
    return os.environ.get("VLLM_AMPERE_TRACEBACK", "") == "1"


def colour() -> bool:
    """`NO_COLOR`, everybody's convention: set to anything, output has no colour, on terminals too."""
    return not os.environ.get("NO_COLOR")


def cache_home() -> Path:
    """`XDG_CACHE_HOME`, everybody's convention: the user's cache folder, `~/.cache` if it is not set."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
