# SPDX-License-Identifier: Apache-2.0
"""The engram table: its host memory, and the look-up on our op."""

import torch

from .. import arch, pinned_memory
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
    engram_lookup(
        table.view(torch.uint8), scales, own, embedding.vocab_start_idx, embedding.vocab_end_idx, out[:, :columns]
    )
    if columns < out.shape[1]:
        out[:, columns:].zero_()
    return True


def allocate_table(embedding) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Pinned host memory of a rank's own table, codes and scales in one allocation of exactly their size.

    Args:
        embedding: upstream's ParallelEngramEmbedding, offloaded and not shared; remembers the allocation.

    Returns:
        float8_e4m3fn [rows of this rank, 256] and uint8 [rows, 8]; None, without `use_thp` or on a processor that
        does not take our path, leaves the allocation to upstream.

    Raises:
        AmpereError: it does not fit, or CUDA does not pin it.
    """
    if not embedding.use_thp or gate.architecture() in (None, arch.CPU):
        return None
    values = embedding.part_num_embeddings * embedding.dim
    packed = embedding._packed = pinned_memory.allocate(values + values // embedding.block_size)
    codes = packed[:values].view(torch.float8_e4m3fn).view(-1, embedding.dim)
    return codes, packed[values:].view(-1, embedding.dim // embedding.block_size)
