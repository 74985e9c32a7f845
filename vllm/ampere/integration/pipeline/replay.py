# SPDX-License-Identifier: Apache-2.0
"""Bounded replay over pipeline stages.

In a long prefill step the layers behind the last KV source run on each request's last window of rows, on whatever
stage they are. Every stage finds these rows itself, from what the scheduler says, and a stage that ran on them sends
no others.
"""

import torch
from vllm.forward_context import override_forward_context
from vllm.models.deepseek_v41.decoder_replay_layers import DecoderReplayLayers

from .. import trace


class StageReplayLayers(DecoderReplayLayers):
    """The replay layers of one stage.

    Args:
        layers: as upstream built them for this stage.
        behind_source: the stage starts behind the last KV source. Its windows then hold the kept rows only, from its
            first layer on, and no layer writes KV for all rows.
        compact_in: in a trimmed step the stage before sends the kept rows only.
        compact_out: in a trimmed step this stage does.
    """

    def __init__(self, layers: DecoderReplayLayers, behind_source: bool, compact_in: bool, compact_out: bool):
        write = (lambda *states: None) if behind_source else layers.write_batch_kv
        super().__init__(layers.window, layers.run_layers, write, layers.metadata_prefixes, layers.first_swa_prefix)
        self.behind_source, self.compact_in, self.compact_out = behind_source, compact_in, compact_out

    def select(self, tensor: torch.Tensor, sent: bool) -> torch.Tensor:
        """The kept rows of a tensor of this step; where it was `sent` by the stage before, it may hold no others."""
        rows = self.replay_batch.rows
        return tensor[: rows.numel()] if sent and self.compact_in else tensor.index_select(0, rows)

    def spread(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """The kept rows of `tensor` at their places among the step's `rows`; the others are zero and read by nothing."""
        kept = self.replay_batch.rows
        return tensor.new_zeros((rows, *tensor.shape[1:])).index_copy_(0, kept, tensor[: kept.numel()])

    def _run(self, hidden_states, *states):
        if self.replay_batch is None:
            return super()._run(hidden_states, *states)
        positions, input_ids, pre_mix, *mixes = states
        trace.emit("replay_rows", rows=positions.shape[0], kept=self.replay_batch.rows.numel())
        own = (None if state is None else self.select(state, False) for state in (positions, input_ids))
        with override_forward_context(self.replay_batch.forward_context):
            outputs = self.run_layers(
                self.select(hidden_states, self.behind_source),
                *own,
                self.select(pre_mix, self.behind_source),
                *(None if state is None else self.select(state, False) for state in mixes),
            )
        return tuple(outputs) if self.compact_out else tuple(self.spread(t, positions.shape[0]) for t in outputs)
