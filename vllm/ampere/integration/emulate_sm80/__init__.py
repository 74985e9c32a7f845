# SPDX-License-Identifier: Apache-2.0
"""A newer NVIDIA card that runs what vLLM runs on Ampere: `VLLM_AMPERE_ASSUME=sm80` (or sm86) is the switch.

vLLM then believes in compute capability 8.0 (8.6). Triton lowers for it and assembles for the card at hand, so no
newer instruction is used; TileLang likewise (`tilelang_target`). A call that reaches DeepGEMM, FlashMLA or a CuTeDSL
kernel raises (`tripwires`): on the newer card it would run, and hide that it has no Ampere code.

What this proves and what it cannot is in docs/en/numerics.md. vLLM's compiled operators run their build for the card.
"""

import os

from ... import envs
from ...errors import SelectionError

CAPABILITIES = {"sm80": (8, 0), "sm86": (8, 6)}


def detect() -> str | None:
    """Entry point of vLLM's platform plugins: the emulated platform's name where it is asked for.

    It is called before anything is compiled, so it also tells Triton.

    Raises:
        SelectionError: there is no NVIDIA card to emulate on, or Triton is told to lower for something else.
    """
    name = envs.assumed_architecture()
    if not name:
        return None
    from vllm.platforms import builtin_platform_plugins

    if builtin_platform_plugins["cuda"]() is None:
        raise SelectionError("VLLM_AMPERE_ASSUME is set and no NVIDIA card is found", "unset it; it is for tests on a newer card")
    lowered = os.environ.setdefault("TRITON_OVERRIDE_ARCH", name)
    if lowered != name:
        raise SelectionError(f"TRITON_OVERRIDE_ARCH={lowered} contradicts VLLM_AMPERE_ASSUME={name}", "unset the first")
    return f"{__name__}.platform.EmulatedPlatform"


def install() -> None:
    """In a process on the emulated platform: the tripwires, and TileLang's target. Does nothing elsewhere, or twice."""
    from vllm.platforms import current_platform

    if not (envs.assumed_architecture() and current_platform.is_cuda()):
        return
    from . import tilelang_target, tripwires

    tripwires.install()
    tilelang_target.install(CAPABILITIES[envs.assumed_architecture()])
