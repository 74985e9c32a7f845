# SPDX-License-Identifier: Apache-2.0
"""The tensors between two stages, as the runner and the worker handle them."""

import torch

from ...pipeline_cut import CANDIDATES, SELECTIONS

# A tensor group sends a tensor in slices, one from each rank, and puts them together again. Two ranks may hold the
# same selection in another order: a row put together from both would name one entry twice and lack another.
WHOLE = dict.fromkeys(SELECTIONS, False)


def receive(name: str, buffer: torch.Tensor, received) -> torch.Tensor:
    """Copy what the stage before sent into a buffer of fixed address; returns the buffer.

    Args:
        name: of the tensor.
        buffer: [T, ...]; a trimmed step has fewer rows, and the buffer's others stay as they are.
        received: IntermediateTensors from the stage before.
    """
    if name == CANDIDATES and name not in received.tensors:  # every visible block is a candidate
        return buffer.copy_(torch.arange(buffer.shape[1], dtype=buffer.dtype, device=buffer.device))
    given = received.tensors[name][: len(buffer)]
    buffer[: len(given)].copy_(given)
    return buffer


def send(tensors, own, config, seq_lens: torch.Tensor):
    """What goes to the next stage.

    Args:
        tensors: IntermediateTensors of this step, with the features of earlier stages as they came.
        own: the model's, whose rows are right where it has a name too.
        config: of the model.
        seq_lens: int32 [requests] on the host, upper bounds of their lengths.
    """
    tensors.tensors.update(own.tensors)
    if CANDIDATES in tensors.tensors:
        ratio = config.compress_ratios[config.candidate_source_layer_id]
        # As long as all blocks of a context are candidates there is nothing to say about them.
        if int(seq_lens.max()) <= config.candidate_topk_blocks * config.candidate_block_size * ratio:
            del tensors.tensors[CANDIDATES]
    return tensors
