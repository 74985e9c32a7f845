# SPDX-License-Identifier: Apache-2.0
"""The wheel that the image installs holds machine code for Ampere, so that no driver compiles its PTX for the card."""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.repo.test_pins import PINS
from vllm.ampere import environment

pytestmark = pytest.mark.vllm  # the wheel's cache, and the cuobjdump of triton's
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch")


def printed(name: str, folder: Path, *options: str) -> str:
    """What cuobjdump says of a library of the wheel."""
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with zipfile.ZipFile(environment.CACHE / PINS["vllm"]["wheel"]) as wheel:
        library = wheel.extract(f"vllm/{name}.abi3.so", folder)
    command = [cuobjdump, *options, library]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


@pytest.mark.parametrize("name", LIBRARIES)
def test_marlin_is_compiled_for_ampere(name, tmp_path):
    """sm_80 machine code runs on 8.6 as well; for sm_86 alone these libraries hold a part of their kernels."""
    assert all(f".{arch}.cubin" in printed(name, tmp_path, "--list-elf") for arch in ("sm_80", "sm_86"))
    usage = printed(name, tmp_path, "-res-usage", "-arch", "sm_80")
    kernels = [line for line in usage.splitlines() if "Function" in line]
    assert any("marlin" in line.lower() for line in kernels)


def test_marlin_has_the_tiles_that_the_experts_padding_counts_on(tmp_path):
    """For E2M1 weights with UE8M0 scales of 32: 64 outputs by 128 inputs and 128 by 64, at every block of rows.

    Template arguments: types of activations, weights, results and scales, then threads, blocks of 16 rows, outputs and
    inputs, whether a block has 8 rows, stages, 16s of a group.
    """
    from vllm.scalar_type import scalar_types

    types = scalar_types.bfloat16, scalar_types.float4_e2m1f, scalar_types.bfloat16, scalar_types.float8_e8m0fnu
    mangled = "".join(f"Ll{scalar.id}E" for scalar in types)
    usage = printed("_moe_C_stable_libtorch", tmp_path, "-res-usage", "-arch", "sm_80")
    found = {
        (8 if eight == "1" else 16 * int(rows), 16 * int(outputs), 16 * int(inputs))
        for rows, outputs, inputs, eight in re.findall(
            rf"marlin_moe_wna16\d*MarlinI{mangled}Li\d+ELi(\d+)ELi(\d+)ELi(\d+)ELb(\d)ELi4ELi2E", usage
        )
    }
    assert found >= {(rows, *tile) for rows in (8, 16, 32, 48, 64) for tile in ((64, 128), (128, 64))}
