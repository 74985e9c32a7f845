# SPDX-License-Identifier: Apache-2.0
from fractions import Fraction

import numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ampere.kernels.quantization.ue8m0 import power_of_two_scale, ue8m0_decode

ALL = torch.arange(256, dtype=torch.uint8)


def smallest_byte(amax: float) -> int:
    """The first exponent whose power of two reaches the float32 product, in exact fractions."""
    product = Fraction(float(numpy.float32(max(numpy.float32(amax), numpy.float32(1e-4))) * numpy.float32(1 / 448)))
    exponent = -126
    while Fraction(2) ** exponent < product:
        exponent += 1
    return exponent + 127


def test_every_byte():
    got = ue8m0_decode(ALL)
    assert got[0].item() == 0 and not got[0].signbit() and got[255].item() == torch.inf
    assert [v.item() for v in got[1:255]] == [2.0 ** (b - 127) for b in range(1, 255)]


def test_agrees_with_torch_between_the_ends():
    assert torch.equal(ue8m0_decode(ALL[1:255]), ALL[1:255].view(torch.float8_e8m0fnu).float())


def test_exact_powers_and_their_neighbours():
    """448 * 2^k takes the scale 2^k exactly; one step more takes the next."""
    exponents = torch.arange(-20, 100)
    amax = (448 * torch.exp2(exponents.double())).float()
    assert torch.equal(power_of_two_scale(amax).long(), exponents + 127)
    above = amax * (1 + 2.0**-20)
    assert torch.equal(power_of_two_scale(above).long(), exponents + 128)
    for value in (*amax, *above, *(amax * (1 - 2.0**-20))):
        assert power_of_two_scale(value).item() == smallest_byte(value.item())


def test_floor_and_ends():
    low = torch.tensor([0.0, 1e-45, 1e-5, 1e-4])
    assert (power_of_two_scale(low) == smallest_byte(1e-4)).all() and smallest_byte(1e-4) == 105
    assert power_of_two_scale(torch.tensor(torch.finfo(torch.float32).max)).item() == smallest_byte(
        float(numpy.finfo("f4").max)
    )
    assert (power_of_two_scale(torch.tensor([torch.inf, torch.nan])) == 255).all()


@settings(deadline=None)
@given(st.floats(min_value=0, width=32, allow_nan=False, allow_infinity=False))
def test_any_magnitude(amax):
    assert power_of_two_scale(torch.tensor(amax, dtype=torch.float32)).item() == smallest_byte(amax)
