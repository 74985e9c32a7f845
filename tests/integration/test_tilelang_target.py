# SPDX-License-Identifier: Apache-2.0
"""TileLang lowered for one architecture and assembled for another: needs TileLang and nvcc, no card."""

import importlib.util
import struct

import pytest

from vllm.ampere.integration.emulate_sm80.tilelang_target import target

needs_tilelang = pytest.mark.skipif(importlib.util.find_spec("tilelang") is None, reason="tilelang is not installed")


def doubled():
    """A kernel that copies through shared memory: on Hopper TileLang makes that a bulk copy behind a barrier."""
    import tilelang.language as T

    @T.prim_func
    def kernel(x: T.Tensor((1024, 128), "float32"), y: T.Tensor((1024, 128), "float32")):
        with T.Kernel(8, threads=128) as block:
            tile = T.alloc_shared((128, 128), "float32")
            T.copy(x[block * 128, 0], tile)
            for i, j in T.Parallel(128, 128):
                tile[i, j] = tile[i, j] * 2
            T.copy(tile, y[block * 128, 0])

    return kernel


def lower(config: dict) -> tuple[str, int]:
    """CUDA source of the kernel, and the architecture number that its machine code names."""
    import tilelang

    tvm = tilelang.tvm
    destination = tvm.target.Target(config)
    with tvm.transform.PassContext(opt_level=3), destination:
        source = tilelang.lower(doubled(), target=destination).kernel_source
    binary = bytes(tvm.get_global_func("tilelang_callback_cuda_compile")(source, destination, {}))
    (flags,) = struct.unpack_from("<I", binary, 0x30)
    return source, flags >> 8 & 0xFF


@needs_tilelang
@pytest.mark.parametrize("capability", [(8, 0), (8, 6)])
def test_source_is_of_the_older_and_machine_code_of_the_newer(capability):
    source, machine = lower(target(capability, (9, 0)))
    assert machine == 90
    assert not [word for word in ("tma_", "Barrier", "mbarrier") if word in source]


@needs_tilelang
def test_control_native_source_has_bulk_copies():
    source, machine = lower({"kind": "cuda", "arch": "sm_90"})
    assert machine == 90 and "tma_" in source and "arrier" in source


def test_target_names_both_capabilities():
    assert target((8, 6), (12, 0)) == {"kind": "cuda", "arch": "sm_86", "code": ["sm_120"]}
