# SPDX-License-Identifier: Apache-2.0
"""CudaPlatform with another compute capability. Importing this needs NVIDIA's driver."""

import sys

import torch
from vllm.platforms.cuda import CudaPlatform
from vllm.platforms.interface import DeviceCapability

from ... import envs
from . import CAPABILITIES

CAPABILITY = CAPABILITIES[envs.assumed_architecture()]
_of_the_card = torch.cuda.get_device_capability


def _told_to_vllm(device=None) -> tuple[int, int]:
    """Triton and TileLang build for the card that this names, so only callers inside vLLM are told another."""
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return CAPABILITY if caller.startswith("vllm.") else _of_the_card(device)


torch.cuda.get_device_capability = _told_to_vllm


class EmulatedPlatform(CudaPlatform):
    """The card at hand with the compute capability that `VLLM_AMPERE_ASSUME` names."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(*CAPABILITY)

    @classmethod
    def is_arch_support_pdl(cls) -> bool:
        return False
