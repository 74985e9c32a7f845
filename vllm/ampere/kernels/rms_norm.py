# SPDX-License-Identifier: Apache-2.0
"""Root-mean-square normalisation, shared by the references (model_spec section 3)."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * (mean(x^2) + eps)^(-1/2) * weight over the last dimension, in float32 and not rounded."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
