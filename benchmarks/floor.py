# SPDX-License-Identifier: Apache-2.0
"""What the card can do at best, measured in the run that the fractions belong to.

Four ceilings: a copy (bytes read and written), a copy from pinned host memory (bytes that cross the link), torch's bf16
matrix product, and a plain Triton matrix product lowered as our kernels are. The last is the ceiling of code that
multiplies with mma.sync, whatever else the card has.
"""

import torch

from vllm.ampere.kernels.launch import tl, triton
from vllm.ampere.testing.timing import EagerCalls, GraphReplay, race, spread

COPY_BYTES = 1 << 30
HOST_COPY_BYTES = 1 << 28
GEMM_SIZE = 8192
# (BM, BN, BK, warps, stages): the best of these is the ceiling. Each fits SM86's shared memory.
_TILES = ((128, 128, 32, 4, 4), (128, 128, 64, 8, 3), (128, 256, 32, 8, 3))
_GROUP = 8


@triton.jit
def _gemm_kernel(a_ptr, b_ptr, c_ptr, size, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    """A tile of C = A B^T, row-major square matrices whose size every tile divides; GROUP rows of tiles share L2."""
    across = size // BN
    group = tl.program_id(0) // (GROUP * across)
    within = tl.program_id(0) % (GROUP * across)
    offs_m = (group * GROUP + within % GROUP) * BM + tl.arange(0, BM)
    offs_n = within // GROUP * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    a = a_ptr + offs_m[:, None] * size + offs_k[None, :]
    b = b_ptr + offs_n[None, :] * size + offs_k[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, size, BK):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += BK
        b += BK
    tl.store(c_ptr + offs_m[:, None] * size + offs_n[None, :], acc.to(tl.bfloat16))


def _gemm(a, b, c, bm, bn, bk, warps, stages):
    tiles = (GEMM_SIZE // bm) * (GEMM_SIZE // bn)
    _gemm_kernel[(tiles,)](
        a, b, c, GEMM_SIZE, BM=bm, BN=bn, BK=bk, GROUP=_GROUP, num_warps=warps, num_stages=stages
    )


def measure(ours) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The ceilings, and the samples behind them.

    Args:
        ours: context under which Triton compiles as for our kernels.

    Returns:
        copy_bytes_per_s, host_copy_bytes_per_s, matmul_flops_per_s, mma_flops_per_s; contestant to microseconds.

    Raises:
        AssertionError: the plain Triton product differs from torch's.
    """
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda").bfloat16() for _ in range(2))
    c, want = torch.empty_like(a), torch.empty_like(a)
    pinned = torch.empty(HOST_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    replays = {
        "copy": GraphReplay([lambda: target.copy_(source)]),
        "host-copy": EagerCalls([lambda: target[:HOST_COPY_BYTES].copy_(pinned, non_blocking=True)]),
        "matmul": GraphReplay([lambda: torch.matmul(a, b.T, out=want)]),
    }
    with ours():
        for tile in _TILES:
            c.fill_(torch.nan)
            replays["mma " + "x".join(map(str, tile))] = GraphReplay([lambda tile=tile: _gemm(a, b, c, *tile)])
            error = ((c.double() - want.double()).norm() / want.double().norm()).item()
            assert error < 5e-3, f"the plain matrix product with tile {tile} is off by {error:.1e}"
    samples = race(replays)
    seconds = {name: spread(taken).median_us * 1e-6 for name, taken in samples.items()}
    flops = 2 * GEMM_SIZE**3
    return {
        "copy_bytes_per_s": 2 * COPY_BYTES / seconds["copy"],
        "host_copy_bytes_per_s": HOST_COPY_BYTES / seconds["host-copy"],
        "matmul_flops_per_s": flops / seconds["matmul"],
        "mma_flops_per_s": flops / min(s for name, s in seconds.items() if name.startswith("mma")),
    }, samples
