# SPDX-License-Identifier: Apache-2.0
"""The wheel that the image installs holds machine code for Ampere, so that no driver compiles its PTX for the card."""

import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.repo.test_pins import PINS
from vllm.ampere import environment

pytestmark = pytest.mark.vllm  # the wheel's cache, and the cuobjdump of triton's
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch")


@pytest.mark.parametrize("name", LIBRARIES)
def test_marlin_is_compiled_for_ampere(name, tmp_path):
    """sm_80 machine code runs on 8.6 as well; for sm_86 alone these libraries hold a part of their kernels."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with zipfile.ZipFile(environment.CACHE / PINS["vllm"]["wheel"]) as wheel:
        library = wheel.extract(f"vllm/{name}.abi3.so", tmp_path)

    def printed(*options: str) -> str:
        command = [cuobjdump, *options, library]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout

    assert all(f".{arch}.cubin" in printed("--list-elf") for arch in ("sm_80", "sm_86"))
    kernels = [line for line in printed("-res-usage", "-arch", "sm_80").splitlines() if "Function" in line]
    assert any("marlin" in line.lower() for line in kernels)
