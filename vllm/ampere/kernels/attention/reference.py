# SPDX-License-Identifier: Apache-2.0
"""The attention family in plain PyTorch, float32 (model_spec section 5)."""

import torch

from ..rope import rotate_tail


def inverse_rope_ref(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """See `inverse_rope`."""
    return rotate_tail(o, positions, cos_sin, inverse=True).to(o.dtype)
