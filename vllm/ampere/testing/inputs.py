# SPDX-License-Identifier: Apache-2.0
"""Random inputs that cases, tests and benchmarks share."""

import torch


def normal(generator: torch.Generator, *shape: int, dtype=torch.bfloat16, device="cpu", scale: float = 1.0) -> torch.Tensor:
    """Normal values; drawn on the CPU so that every device sees the same numbers."""
    return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)


def integers(generator: torch.Generator, low: int, high: int, *shape: int, dtype=torch.int64, device="cpu") -> torch.Tensor:
    """Uniform integers in [low, high)."""
    return torch.randint(low, high, shape, generator=generator).to(device=device, dtype=dtype)


def rope_table(length: int, dim: int = 64, base: float = 10000.0, device="cpu") -> torch.Tensor:
    """float32 [length, dim]: cosines then sines of position * base^(-2i/dim)."""
    angle = torch.outer(torch.arange(length).double(), base ** (-torch.arange(0, dim, 2).double() / dim))
    return torch.cat([angle.cos(), angle.sin()], -1).float().to(device)
