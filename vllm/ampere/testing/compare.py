# SPDX-License-Identifier: Apache-2.0
"""Comparison of an output with its reference, by relative norm and by worst element."""

from dataclasses import dataclass

import torch

from ..kernels.registry import Tolerance


@dataclass(frozen=True)
class Difference:
    """How far `got` is from `want`, in float64.

    Attributes:
        relative_norm: ||got - want|| / ||want|| (the norm of the difference where want is all zero).
        worst: max|got - want| / rms(want).
        where: index of the worst element.
    """

    relative_norm: float
    worst: float
    where: tuple[int, ...]


def difference(got: torch.Tensor, want: torch.Tensor) -> Difference:
    """Measure `got` against `want`; NaN and infinities must stand at the same places in both.

    Raises:
        AssertionError: shapes differ, or one has a NaN or infinity that the other lacks.
    """
    assert got.shape == want.shape, f"shape {list(got.shape)}, want {list(want.shape)}"
    if got.numel() == 0:
        return Difference(0.0, 0.0, ())
    got, want = got.double(), want.double()
    special = ~torch.isfinite(want)
    same = torch.where(want.isnan(), got.isnan(), got == want)
    wrong = torch.nonzero((special & ~same) | (~special & ~torch.isfinite(got)))
    assert not len(wrong), f"{len(wrong)} elements are NaN or infinite where the reference is not (or the reverse), first at {tuple(wrong[0].tolist())}"
    delta = torch.where(special, 0.0, got - want)
    want = torch.where(special, 0.0, want)
    norm, rms = want.norm().item(), want.square().mean().sqrt().item()
    flat = int(delta.abs().argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), delta.shape)) if delta.dim() else ()
    return Difference(delta.norm().item() / (norm or 1.0), delta.abs().max().item() / (rms or 1.0), where)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, label: str = "") -> None:
    """Raise AssertionError with the worst element if `got` is outside the tolerance of `want`."""
    if tolerance.relative_norm == 0.0 and tolerance.worst == 0.0:
        assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, want {want.dtype}"
    seen = difference(got, want)
    assert seen.relative_norm <= tolerance.relative_norm and seen.worst <= tolerance.worst, (
        f"{label}: relative norm {seen.relative_norm:.3e} (allowed {tolerance.relative_norm:.3e}), "
        f"worst element {seen.worst:.3e} rms (allowed {tolerance.worst:.3e}) at {seen.where}: "
        f"{got[seen.where].item()} instead of {want[seen.where].item()}"
    )
