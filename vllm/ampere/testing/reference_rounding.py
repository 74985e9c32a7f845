# SPDX-License-Identifier: Apache-2.0
"""Where a V4.1 loses bits besides its weights, gathered in one policy (model_spec sections 3, 12 and 13).

Every function takes float32 and returns the float32 value that survives; nothing is packed into bytes.
"""

from dataclasses import dataclass
from typing import Callable

import torch

from ..cache_layout import AMAX_FLOOR, E4M3_MAX, KV_GROUP, NOPE_DIM

E2M1_MAX = 6.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def exact(x: torch.Tensor) -> torch.Tensor:
    """Keep every bit."""
    return x


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Through bfloat16, round to nearest even."""
    return x.bfloat16().float()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """To the nearest E4M3 value, saturating at 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 (either sign), ties to the even code, saturating at 6."""
    size = x.abs().clamp(max=E2M1_MAX)
    above = torch.bucketize(size.contiguous(), _E2M1).clamp(min=1)
    low, high = _E2M1[above - 1], _E2M1[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return torch.where(up, high, low).copysign(x)


def power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below `x` > 0."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _in_groups(x: torch.Tensor, size: int, floor: float, scale: Callable, code: Callable) -> torch.Tensor:
    """Give each `size` consecutive values a common scale, round them in its unit, and scale back."""
    groups = x.unflatten(-1, (-1, size))
    unit = scale(groups.abs().amax(-1, keepdim=True).clamp(min=floor))
    return (code(groups / unit) * unit).flatten(-2)


def q8(x: torch.Tensor, size: int) -> torch.Tensor:
    """E4M3 values with a power-of-two scale for each `size`; the factor 1/448 is a float32 multiply."""
    return _in_groups(x, size, AMAX_FLOOR, lambda amax: power_of_two(amax * (1 / E4M3_MAX)), e4m3)


def q4m(x: torch.Tensor, size: int = 32) -> torch.Tensor:
    """MXFP4: E2M1 values with a power-of-two scale."""
    return _in_groups(x, size, E2M1_MAX * 2**-126, lambda amax: power_of_two(amax / E2M1_MAX), e2m1)


def q4n(x: torch.Tensor, size: int = 16) -> torch.Tensor:
    """NVFP4 without a tensor scale: E2M1 values with an E4M3 scale."""
    return _in_groups(x, size, E2M1_MAX * 2**-9, lambda amax: e4m3(amax / E2M1_MAX), e2m1)


def record(x: torch.Tensor) -> torch.Tensor:
    """The 584-byte record: 448 dims in E4M3 by groups of 64, the rotated 64 in bfloat16."""
    return torch.cat([q8(x[..., :NOPE_DIM], KV_GROUP), bf16(x[..., NOPE_DIM:])], -1)


def index_row(x: torch.Tensor) -> torch.Tensor:
    """An index key, or one head of an index query: 128 E4M3 values under one scale."""
    return q8(x, x.shape[-1])


@dataclass(frozen=True)
class Rounding:
    """What is lost at each point.

    Attributes:
        activation: at every tensor that a bfloat16 engine stores: outputs of linears, norms, rotations,
            stream mixes, expert activations. Statistics, index scores, soft-maxes and sums stay float32.
        router: router logits. vLLM's gate is a bfloat16 linear wherever no float32-output kernel exists.
        shared_silu: sigmoid and product inside the shared expert's SiLU, which vLLM's native form
            computes in bfloat16, one operation at a time; routed experts keep float32 there.
        window: rotated latent [..., 512] on its way into the sliding-window cache.
        compressed: rotated latent [..., 512] on its way into the compressed cache.
        index: rotated index query or key [..., 128].
    """

    activation: Callable[[torch.Tensor], torch.Tensor] = exact
    router: Callable[[torch.Tensor], torch.Tensor] = exact
    shared_silu: Callable[[torch.Tensor], torch.Tensor] = exact
    window: Callable[[torch.Tensor], torch.Tensor] = exact
    compressed: Callable[[torch.Tensor], torch.Tensor] = exact
    index: Callable[[torch.Tensor], torch.Tensor] = exact


# Nothing is lost.
FLOAT32 = Rounding()
# The caches that the model was trained with, all else float32.
RELEASED = Rounding(window=lambda x: q8(x, 32), compressed=q4n, index=q4m)
# The caches of the SM80 engine, all else float32.
ENGINE_CACHES = Rounding(window=record, compressed=record, index=index_row)
# The SM80 engine: its caches and its bfloat16 activations.
ENGINE = Rounding(activation=bf16, router=bf16, shared_silu=bf16, window=record, compressed=record, index=index_row)
