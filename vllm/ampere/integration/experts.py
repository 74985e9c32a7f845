# SPDX-License-Identifier: Apache-2.0
"""What Marlin's experts ask of the overlay."""

import torch

from ..kernels.moe.expert_order import expert_order
from . import gate


def order_by_token(
    order: torch.Tensor,
    ids: torch.Tensor,
    experts: torch.Tensor,
    padded: torch.Tensor,
    block_size: int,
    count: int,
    expert_map: torch.Tensor | None,
) -> None:
    """`expert_order`, where this processor takes our path and an expert may have more tokens than a block.

    Args:
        order, experts, padded: what `moe_align_block_size` returned; `order` is written in place.
        ids: integers [T, K], the experts of each token.
        block_size: rows of a block.
        count: experts of this rank.
        expert_map: int32 [experts of all ranks], or None.
    """
    # A token names an expert once, so in so few tokens none has a second block.
    if ids.shape[0] > block_size and gate.architecture() is not None:
        expert_order(order, ids.int(), experts, padded, block_size, count, expert_map)
