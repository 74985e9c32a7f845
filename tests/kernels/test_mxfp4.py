# SPDX-License-Identifier: Apache-2.0
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.ampere.kernels.quantization.mxfp4 import mxfp4_decode, mxfp4_encode

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def nearest(value: float) -> int:
    """Code by search over the eight magnitudes; of two equally near ones the even code."""
    distances = [abs(abs(value) - m) for m in MAGNITUDES]
    near = [c for c in range(8) if distances[c] == min(distances)]
    return min(near, key=lambda c: c % 2) + (8 if math.copysign(1, value) < 0 else 0)


def codes_of(packed: torch.Tensor) -> list[int]:
    return [nibble for byte in packed.flatten().tolist() for nibble in (byte & 15, byte >> 4)]


def test_every_code_under_every_scale():
    values = torch.tensor([s * m for s in (1, -1) for m in MAGNITUDES])
    packed = torch.tensor([low | high << 4 for high in range(16) for low in range(16)], dtype=torch.uint8).view(16, 16)
    for byte in (1, 60, 127, 200, 251):
        scales = torch.full((16, 1), byte, dtype=torch.uint8)
        want = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1).view(16, 32) * 2.0 ** (byte - 127)
        assert torch.equal(mxfp4_decode(packed, scales), want)
        assert torch.equal(mxfp4_decode(packed.view(torch.int8), scales), want)


def test_scale_bytes_zero_and_255():
    packed = torch.full((2, 16), 0x02, dtype=torch.uint8)
    got = mxfp4_decode(packed, torch.tensor([[0], [255]], dtype=torch.uint8))
    assert (got[0] == 0).all() and (got[1, ::2] == torch.inf).all() and got[1, 1::2].isnan().all()


def test_ties_of_the_specification():
    """0.25 to 0, 0.75 to 1, 1.25 to 1, 1.75 to 2, 2.5 to 2, 3.5 to 4, 5 to 4; a 6 in the group fixes the scale at 1."""
    ties, rounded = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], [0, 1, 1, 2, 2, 4, 4]
    row = torch.tensor([[6.0, *ties, *(-t for t in ties)] + [0.0] * 17])
    packed, scales = mxfp4_encode(row)
    assert scales.tolist() == [[127]]
    assert mxfp4_decode(packed, scales)[0, :15].tolist() == [6, *rounded, *(-r for r in rounded)]


def test_negative_underflow_keeps_its_sign():
    packed, _ = mxfp4_encode(torch.tensor([[6.0, -0.1, -0.0] + [0.0] * 29]))
    assert codes_of(packed)[:4] == [7, 8, 8, 0]


def test_zero_group_takes_the_lowest_scale():
    packed, scales = mxfp4_encode(torch.zeros(2, 64))
    assert (packed == 0).all() and (scales == 1).all()


def test_group_maximum_and_its_neighbours():
    """6 * 2^k takes the scale 2^k; one float32 step more takes the next."""
    for k in (-100, -3, 0, 5, 120):
        at = torch.tensor(6.0 * 2.0**k)
        group = torch.zeros(3, 32)
        group[0, 3], group[1, 3], group[2, 3] = (
            at,
            torch.nextafter(at, torch.tensor(torch.inf)),
            torch.nextafter(at, torch.tensor(0.0)),
        )
        assert mxfp4_encode(group)[1].flatten().tolist() == [k + 127, k + 128, k + 127]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=32, max_size=32))
def test_any_group(values):
    packed, scales = mxfp4_encode(torch.tensor([values], dtype=torch.float32))
    amax = max(max(abs(v) for v in values), 6 * 2.0**-126)
    mantissa, exponent = math.frexp(amax / 6)
    scale = 2.0 ** (exponent - (mantissa == 0.5))
    assert 2.0 ** (int(scales) - 127) == scale
    assert codes_of(packed) == [nearest(v / scale) for v in values]


def test_encoding_a_decoded_matrix_is_exact():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (7, 48), generator=generator, dtype=torch.uint8)
    packed[:, ::16] |= 0x07
    scales = torch.randint(100, 150, (7, 3), generator=generator, dtype=torch.uint8)
    again, scales_again = mxfp4_encode(mxfp4_decode(packed, scales))
    assert torch.equal(again, packed) and torch.equal(scales_again, scales)
