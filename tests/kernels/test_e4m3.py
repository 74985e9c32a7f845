# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm.ampere.kernels.quantization.e4m3 import e4m3_decode, e4m3_encode

CODES = torch.arange(256, dtype=torch.uint8)
MAGNITUDES = CODES[:127].view(torch.float8_e4m3fn).float()


def torch_encode(x: torch.Tensor) -> torch.Tensor:
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def check(x: torch.Tensor):
    for signed in (x, -x):
        assert torch.equal(e4m3_encode(signed), torch_encode(signed))


def test_every_code_decodes_to_its_definition():
    """From the format's definition, and from torch's cast."""
    got = e4m3_decode(CODES)
    for code in range(256):
        sign, exponent, mantissa = (-1.0) ** (code >> 7), code >> 3 & 15, code & 7
        if code & 127 == 127:
            assert got[code].isnan()
        else:
            want = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
            assert got[code].item() == sign * want
    assert torch.equal(got.signbit(), CODES >= 128)
    assert torch.equal(got.nan_to_num(0.0), CODES.view(torch.float8_e4m3fn).float().nan_to_num(0.0))


def test_every_code_survives_a_round_trip():
    assert torch.equal(e4m3_encode(e4m3_decode(CODES)), CODES)


def test_every_midpoint_goes_to_the_even_code():
    """And its neighbours in float32 go to the nearer one."""
    middle = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    code = torch.arange(126, dtype=torch.uint8)
    check(middle)
    assert torch.equal(e4m3_encode(middle), code + code % 2)
    assert torch.equal(e4m3_encode(torch.nextafter(middle, torch.tensor(0.0))), code)
    assert torch.equal(e4m3_encode(torch.nextafter(middle, torch.tensor(1e9))), code + 1)


def test_overflow_saturates():
    big = torch.tensor([448.0, 449, 464, 464.1, 480, 1e9, torch.finfo(torch.float32).max, torch.inf])
    check(big)
    assert (e4m3_encode(big) == 0x7E).all() and (e4m3_encode(-big) == 0xFE).all()


def test_nan_keeps_its_sign():
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32)
    assert (e4m3_encode(patterns.view(torch.float32)) == 0x7F).all()
    assert (e4m3_encode((patterns | -(2**31)).view(torch.float32)) == 0xFF).all()


def test_subnormals_and_underflow():
    check(torch.arange(0, 4096) * 2.0**-17)
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-10, 2.0**-10 * (1 - 2.0**-24)])
    check(tiny)
    assert (e4m3_encode(tiny) == 0).all() and (e4m3_encode(-tiny) == 0x80).all()


def test_every_bfloat16():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert torch.equal(e4m3_encode(every), torch_encode(every))


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_any_float(values):
    x = torch.tensor(values, dtype=torch.float32)
    assert torch.equal(e4m3_encode(x), torch_encode(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_stride(dtype):
    x = (torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    view = x.transpose(0, 2)[:, 1:]
    assert torch.equal(e4m3_encode(view), torch_encode(view))
    codes = torch_encode(x).transpose(0, 2)[:, 1:]
    assert torch.equal(e4m3_decode(codes), codes.contiguous().view(torch.float8_e4m3fn).float())
