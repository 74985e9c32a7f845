# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory of exactly the size asked for.

PyTorch's pinned allocator takes a power of two for each tensor: 264 GiB for engram tables of 189. Here CUDA registers a
mapping of our own, whole, which takes its pages and nothing more.
"""

import mmap
import re
import resource
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from .errors import AmpereError

_GIB = 1 << 30


def _register(address: int, size_bytes: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))


def _unregister(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))


def _available_bytes() -> int:
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 1 << 62


def _locked_limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KiB"


def _release(unregister: Callable[[int], int], address: int, mapping: mmap.mmap) -> None:
    """Give the pages up only after the card has: `mapping` lives as long as this call's arguments."""
    unregister(address)


def allocate(
    size_bytes: int,
    huge_pages: bool = True,
    *,
    register: Callable[[int, int], int] = _register,
    unregister: Callable[[int], int] = _unregister,
    available: Callable[[], int] = _available_bytes,
) -> torch.Tensor:
    """Zeroed memory that cards read and write at the host's own addresses.

    Args:
        size_bytes: at least 1; what is taken is this and the rest of its last page.
        huge_pages: advise the kernel to use transparent huge pages; it may not.
        register: (address, bytes) -> CUDA's error number, 0 for success.
        unregister: address -> CUDA's error number; called when the last view of the memory is gone. A process that
            ends leaves it to the kernel, whose mapping it is.
        available: bytes of host memory that may be taken.

    Returns:
        uint8 [size_bytes] on the CPU; its pages have been touched and registered.

    Raises:
        AmpereError: there is not that much memory, or CUDA does not pin it; nothing stays allocated.
    """
    wanted = f"{size_bytes / _GIB:.1f} GiB"
    if (free := available()) < size_bytes:
        raise AmpereError(
            f"{wanted} of host memory are to be pinned, {free / _GIB:.1f} GiB are available",
            "end what else runs on this host, or use one with more memory: vllm-ampere doctor says what a layout needs",
        )
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise AmpereError(
            f"{wanted} of host memory cannot be mapped: {error.strerror}", "raise ulimit -v, or vm.overcommit_memory"
        ) from error
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
    owner = numpy.frombuffer(mapping, dtype=numpy.uint8)
    # Touched before they are pinned, pages can still be huge.
    owner[:: mmap.PAGESIZE] = 0
    address = owner.ctypes.data
    if error := register(address, size_bytes):
        raise AmpereError(
            f"CUDA does not pin {wanted} of host memory: error {error}, locked memory is limited to {_locked_limit()}",
            "start with unlimited locked memory (docker run --ulimit memlock=-1, or ulimit -l unlimited)",
        )
    # At exit the driver is going down with the process.
    weakref.finalize(owner, _release, unregister, address, mapping).atexit = False
    return torch.from_numpy(owner)
