# SPDX-License-Identifier: Apache-2.0
"""The engram table look-up on our op."""

import torch

from ..kernels.engram.engram_lookup import engram_lookup
from . import gate


def look_up(embedding, indices: torch.Tensor, out: torch.Tensor) -> bool:
    """Fill `out` with this rank's rows of the table, if this processor takes our path.

    Args:
        embedding: upstream's ParallelEngramEmbedding.
        indices: int32 or int64 [T, all hash columns], global row numbers.
        out: bfloat16 [T, columns of this rank, 256]; columns past the table's last are zeroed.

    Returns:
        Whether it was filled; False leaves the look-up to upstream.
    """
    if gate.architecture() is None:
        return False
    table, scales = embedding._storage()
    start = embedding.head_start
    own = indices[:, start : start + embedding.part_n_hash_cols]
    columns = own.shape[1]
    out[:, :columns] = engram_lookup(
        table.view(torch.uint8), scales, own, embedding.vocab_start_idx, embedding.vocab_end_idx
    )
    out[:, columns:].zero_()
    return True
