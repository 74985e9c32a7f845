# SPDX-License-Identifier: Apache-2.0
"""The device codec on every code, every midpoint and random numbers."""

import torch

from vllm.ampere.kernels.launch import tl, triton
from vllm.ampere.kernels.quantization.e4m3 import DECODE, ENCODE
from vllm.ampere.kernels.quantization.reference import e4m3_encode_ref, power_of_two_scale_ref, ue8m0_decode_ref
from vllm.ampere.kernels.quantization.triton_codec import (
    inverse_scale,
    magnitude_bits,
    power_of_two_byte,
    ue8m0_to_float,
)

CODES = torch.arange(256, dtype=torch.uint8)
(DECODE_TRITON,), (ENCODE_TRITON,) = DECODE.implementations, ENCODE.implementations


@triton.jit
def _scale_kernel(x_ptr, byte_ptr, scale_ptr, inverse_ptr, SIZE: tl.constexpr):
    offs = tl.arange(0, SIZE)
    byte = power_of_two_byte(magnitude_bits(tl.load(x_ptr + offs)))
    tl.store(byte_ptr + offs, byte)
    tl.store(scale_ptr + offs, ue8m0_to_float(byte))
    tl.store(inverse_ptr + offs, inverse_scale(byte))


def test_every_code_decodes_as_in_torch():
    got = DECODE_TRITON.function(CODES)
    want = CODES.view(torch.float8_e4m3fn).float()
    assert torch.equal(got.nan_to_num(12345.0), want.nan_to_num(12345.0)) and got[[127, 255]].isnan().all()
    assert torch.equal(got.signbit()[:255], (CODES >= 128)[:255])


def test_encoding_equals_the_reference():
    magnitudes = CODES[:127].view(torch.float8_e4m3fn).float()
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(end)) for end in (0.0, 1e9)]
    ends = torch.tensor([0.0, 1e-45, 1e-38, 448, 449, 464, 480, 1e9, 3e38, torch.inf, torch.nan])
    random = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    random *= torch.exp2(torch.arange(4096) % 24 - 14.0)
    x = torch.cat([magnitudes, middle, *near, ends, random])
    for signed in (x, -x):
        assert torch.equal(ENCODE_TRITON.function(signed), e4m3_encode_ref(signed))
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(ENCODE_TRITON.function(every), e4m3_encode_ref(every))


def test_scales_are_ceilings_read_off_the_bits():
    exact = 448 * torch.exp2(torch.arange(-20, 20).float())
    ends = torch.tensor([0.0, 1e-5, 1e-4, torch.inf, torch.nan, 3e38])
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, 1e30)]
    x = torch.nn.functional.pad(torch.cat([exact, *near, ends]), (0, 2))
    x[::2] *= -1
    byte, scale, inverse = torch.empty(128, dtype=torch.int32), torch.empty(128), torch.empty(128)
    _scale_kernel[(1,)](x, byte, scale, inverse, SIZE=128)
    want = power_of_two_scale_ref(x.abs()).int()
    assert torch.equal(byte, want) and want.max() == 255
    assert torch.equal(scale, ue8m0_decode_ref(want.to(torch.uint8)))
    assert torch.equal(inverse, ue8m0_decode_ref((254 - want).clamp_min(0).to(torch.uint8)))
