# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of the last dimensions in adjacent pairs, shared by the references (model_spec section 3)."""

import torch


def rotate_tail(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate the last R dimensions of `x`; the ones before are copied.

    Args:
        x: [T, ..., D], any float dtype; D >= R.
        positions: [T] integers, tokens.
        cos_sin: float [positions, R], R/2 cosines then R/2 sines.
        inverse: rotate back.

    Returns:
        float32 (float64 if `x` is) of the shape of `x`.
    """
    x = x if x.dtype == torch.float64 else x.float()
    table = cos_sin[positions.long()].to(x.dtype)
    cos, sin = table.chunk(2, -1)
    rotated = cos_sin.shape[1]
    shape = (x.shape[0],) + (1,) * (x.dim() - 2) + (rotated // 2,)
    cos, sin = cos.view(shape), (-sin if inverse else sin).reshape(shape)
    even, odd = x[..., -rotated:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :-rotated], turned], -1)
