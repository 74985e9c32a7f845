# SPDX-License-Identifier: Apache-2.0
"""What the Ampere processors have, and which path a compute capability takes.

Figures are NVIDIA's (CUDA programming guide, compute capabilities table), not measured here.
"""

import functools
import logging
from dataclasses import dataclass, replace

from . import envs
from .errors import UnsupportedDeviceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Architecture:
    """Limits of one processor family.

    Attributes:
        name: "sm80", "sm86" or "cpu"; the name used by implementations and tuned files.
        shared_bytes_per_block: opt-in shared memory of one thread block, bytes.
        registers_per_thread: hard limit of 32-bit registers a thread.
        multiprocessors: of the family's largest common card (A100, A6000); split rules count on it, so that
            every card of a family splits alike.
        missing: instructions that newer processors have and this one lacks.
    """

    name: str
    shared_bytes_per_block: int
    registers_per_thread: int
    multiprocessors: int
    missing: tuple[str, ...]


_MISSING = ("fp8 conversion", "fp8 matrix multiply", "wgmma", "tma", "cluster")
SM80 = Architecture("sm80", 166_912, 255, 108, _MISSING)
SM86 = Architecture("sm86", 101_376, 255, 84, _MISSING)
CPU = Architecture("cpu", 0, 0, 1, ())
ARCHITECTURES = {a.name: a for a in (SM80, SM86, CPU)}


def of_capability(major: int, minor: int) -> Architecture | None:
    """The path for an NVIDIA compute capability, or None where upstream's own path is right.

    8.0 and 8.6 are ours. 8.9 (Ada) has SM86's shared memory and takes its path with a warning. 9.0 and
    newer keep upstream's kernels.

    Raises:
        UnsupportedDeviceError: 8.7 (Jetson, no build of vLLM's kernels) and everything below 8.0.
    """
    if major >= 9:
        return None
    if (major, minor) == (8, 0):
        return SM80
    if (major, minor) == (8, 6):
        return SM86
    if (major, minor) == (8, 9):
        logger.warning("compute capability 8.9 is not tuned for: it runs the SM86 kernels")
        return SM86
    raise UnsupportedDeviceError(
        f"compute capability {major}.{minor} cannot run DeepSeek-V4.1 here",
        "use a card of capability 8.0 (A100, A800) or 8.6 (A6000, A40, A10, RTX 3090), or newer than 8.9",
    )


def of_device(device) -> Architecture:
    """The architecture of a torch device: CPU for "cpu", else that of the CUDA device's capability.

    `VLLM_AMPERE_ASSUME` makes every CUDA device count as the architecture it names, but for its multiprocessors: those
    are the card's, which is there to be filled.

    Raises:
        UnsupportedDeviceError: the device is neither a CPU nor an Ampere card.
    """
    import torch

    return _of(torch.device(device), envs.assumed_architecture())


@functools.cache
def _of(device, assumed: str) -> Architecture:
    """`of_device`, asked at every call of an op."""
    import torch

    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        if assumed:
            found = ARCHITECTURES[assumed]
            if not torch.cuda.is_available():
                return found
            return replace(found, multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count)
        found = of_capability(*torch.cuda.get_device_capability(device))
        if found is not None:
            return found
    raise UnsupportedDeviceError(f"no kernels of ours serve the device {device}", "use an Ampere card or the CPU")
