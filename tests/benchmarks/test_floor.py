# SPDX-License-Identifier: Apache-2.0
"""The matrix product that `mma-fraction` is of: it compiles for Ampere, multiplies with mma.sync and spills nothing."""

import re

import pytest

from benchmarks import floor
from vllm.ampere.kernels.launch import Launch
from vllm.ampere.testing.compile_check import build, faults

pytest.importorskip("triton")


@pytest.mark.compile
@pytest.mark.parametrize("architecture", ["sm80", "sm86"])
@pytest.mark.parametrize("tile", floor._TILES, ids=str)
def test_plain_product_is_what_ampere_runs(tile, architecture):
    bm, bn, bk, warps, stages = tile
    assert floor.GEMM_SIZE % bm == floor.GEMM_SIZE % bn == floor.GEMM_SIZE % bk == 0
    assert floor.GEMM_SIZE // bm % floor._GROUP == 0
    launch = Launch(
        floor._gemm_kernel,
        {**{f"{name}_ptr": "*bf16:16" for name in "abc"}, "size": "i32:16"},
        {"BM": bm, "BN": bn, "BK": bk, "GROUP": floor._GROUP},
        num_warps=warps, num_stages=stages, shared_reason="a pipelined tile of both operands",
    )  # fmt: skip
    built = build(launch, architecture)
    assert faults(launch, built, architecture) == []
    assert re.search(r"mma\.sync\S*\.bf16", built.ptx) and "cp.async" in built.ptx
