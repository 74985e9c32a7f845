# SPDX-License-Identifier: Apache-2.0
"""The repaired interpreter against torch: casts and dots."""

import pytest
import torch

from vllm.ampere.kernels.launch import tl, triton


@triton.jit
def _cast_kernel(x_ptr, y_ptr, SIZE: tl.constexpr, TO: tl.constexpr, BITS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.arange(0, SIZE), x.to(TO).to(BITS, bitcast=True))


@triton.jit
def _read_kernel(x_ptr, y_ptr, SIZE: tl.constexpr, FROM: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(y_ptr + tl.arange(0, SIZE), x.to(FROM, bitcast=True).to(tl.float32))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


def _numbers() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    scale = torch.exp2(torch.randint(-14, 9, (4096,), generator=generator).float())
    return torch.randn(4096, generator=generator) * scale


CASTS = {
    "bf16": (tl.bfloat16, tl.int16, torch.bfloat16),
    "fp16": (tl.float16, tl.int16, torch.float16),
    "e4m3": (tl.float8e4nv, tl.int8, torch.float8_e4m3fn),
    "e5m2": (tl.float8e5, tl.int8, torch.float8_e5m2),
}


@pytest.mark.parametrize("to, bits, dtype", CASTS.values(), ids=CASTS)
def test_casts_round_as_torch_does(to, bits, dtype):
    x = _numbers()
    got = torch.empty(4096, dtype=torch.int8 if dtype.itemsize == 1 else torch.int16)
    _cast_kernel[(1,)](x, got, SIZE=4096, TO=to, BITS=bits)
    want = x.clamp(-448, 448) if dtype == torch.float8_e4m3fn else x
    assert torch.equal(got, want.to(dtype).view(got.dtype))


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_fp8_code_reads_as_in_torch(kind):
    codes, got = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _read_kernel[(1,)](codes, got, SIZE=256, FROM=CASTS[kind][0])
    assert torch.equal(got.nan_to_num(12345.0), codes.view(CASTS[kind][2]).float().nan_to_num(12345.0))


def test_fp8e4b15_is_e4m3_over_256():
    codes, got = torch.arange(256, dtype=torch.uint8), torch.empty(256)
    _read_kernel[(1,)](codes, got, SIZE=256, FROM=tl.float8e4b15)
    number = codes & 0x7F != 0x7F
    assert torch.equal(got[number] * 256, codes.view(torch.float8_e4m3fn).float()[number])


def test_dot_of_bfloat16_is_a_product_of_numbers():
    generator = torch.Generator().manual_seed(2)
    a, b = (torch.randn(32, 32, generator=generator).bfloat16() for _ in range(2))
    got = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, got, SIZE=32)
    assert torch.allclose(got.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
