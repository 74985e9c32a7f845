# SPDX-License-Identifier: Apache-2.0
"""The model of one pipeline stage, where the stages of an engine start inside a group of layers with one KV source."""

import torch
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.models.deepseek_v41.nvidia.model import DeepseekV4Model
from vllm.sequence import IntermediateTensors

from ...pipeline_cut import CANDIDATES, LATENT, TOPK, cut_at, keeps_last_rows, scores_keys_of
from .. import gate
from .cuts import model_spec, relayed_cuts
from .replay import StageReplayLayers
from .shadow import ShadowSource


def model_class(vllm_config) -> type[DeepseekV4Model] | None:
    """The class of a stage's model, or None for upstream's: on other cards, and where only the streams cross."""
    if gate.architecture() is None or not relayed_cuts(vllm_config):
        return None
    return StagedModel


class StagedModel(DeepseekV4Model):
    """Upstream's model of a stage, which also relays what a KV source computed to the stages behind it."""

    def __init__(self, *, vllm_config, prefix: str = ""):
        config, group = vllm_config.model_config.hf_config, get_pp_group()
        spec = model_spec(config)
        start, end = get_pp_indices(spec.num_hidden_layers, group.rank_in_group, group.world_size)
        cut, shadow = cut_at(spec, start), None
        if cut is not None:  # before the layers are built: they look their source up
            shadow = ShadowSource(
                vllm_config,
                f"{prefix}.layers.{cut.kv_source}.attn",
                spec.layers[cut.kv_source].ratio,
                scores_keys_of(spec, start, end, cut.kv_source),
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.cut_in, self.cut_out, self.shadow = cut, cut_at(spec, end), shadow
        if shadow is not None:
            shadow.follow(self.layers[start].attn)
        self.latents, self._latents_due = None, False
        if self.cut_out is not None and self.cut_out.kv_source >= start:
            rows = vllm_config.scheduler_config.max_num_batched_tokens
            self.latents = torch.zeros(rows, config.head_dim, dtype=torch.bfloat16)
            self.layers[self.cut_out.kv_source].attn.compressor.register_forward_hook(self._keep_latents)
        if self.decoder_replay_layers is not None:
            self.decoder_replay_layers = StageReplayLayers(
                self.decoder_replay_layers,
                behind_source=start > spec.kv_source_layer_ids[-1],
                compact_in=keeps_last_rows(spec, start),
                compact_out=keeps_last_rows(spec, end),
            )

    def make_empty_intermediate_tensors(self, batch_size, dtype, device):
        """Upstream's tensors, and those that the cut before this stage adds. Selections arrive where layers read them."""
        empty = super().make_empty_intermediate_tensors(batch_size, dtype, device)
        if self.cut_in is not None:
            empty.tensors[LATENT] = torch.zeros(batch_size, self.config.head_dim, dtype=torch.bfloat16, device=device)
            if self.cut_in.topk:
                empty.tensors[TOPK] = self.topk_indices_buffer[:batch_size]
            if self.cut_in.candidates:
                empty.tensors[CANDIDATES] = self.candidate_block_buffer[:batch_size]
        return empty

    def forward(self, input_ids, positions, intermediate_tensors, *args, **kwargs):
        received = None
        if intermediate_tensors is not None:
            received = self._receive(dict(intermediate_tensors.tensors), positions)
            intermediate_tensors = IntermediateTensors(received)
        self._latents_due = True
        out = super().forward(input_ids, positions, intermediate_tensors, *args, **kwargs)
        if isinstance(out, IntermediateTensors):
            self._send(out.tensors, received, positions.shape[0])
        return out

    @property
    def _trimmed(self) -> StageReplayLayers | None:
        """The replay layers, in a step that runs them on the kept rows only."""
        layers = self.decoder_replay_layers
        return layers if layers is not None and layers.replay_batch is not None else None

    def _receive(self, tensors: dict[str, torch.Tensor], positions: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.cut_in is not None:
            self.shadow.insert(tensors[LATENT], positions)
        replay = self._trimmed
        if replay is None:
            return tensors
        if replay.behind_source and not replay.compact_in:
            # Sent for all rows, and read in the order of the kept ones.
            for name in (TOPK, CANDIDATES):
                if name in tensors:
                    kept = replay.select(tensors[name], False)
                    tensors[name][: len(kept)].copy_(kept)
        if replay.compact_in and get_pp_group().is_last_rank:
            for name in tensors:
                if name.startswith(self.AUX_HIDDEN_STATE_KEY):
                    tensors[name] = replay.spread(tensors[name], positions.shape[0])
        return tensors

    def _keep_latents(self, compressor, args, latents: torch.Tensor | None) -> None:
        """The first of a step are those of all rows; replay computes the kept ones again."""
        if latents is not None and self._latents_due:
            self.latents[: latents.shape[0]].copy_(latents)
            self._latents_due = False

    def _send(self, tensors: dict[str, torch.Tensor], received: dict[str, torch.Tensor] | None, rows: int) -> None:
        """Add what the next stage needs, all of it in the rows of `hidden_states` but the latents."""
        run, replay = tensors["hidden_states"].shape[0], self._trimmed
        if replay is not None and replay.compact_out:
            for name, tensor in tensors.items():
                if name.startswith(self.AUX_HIDDEN_STATE_KEY) and len(tensor) != run:  # taken before the replay layers
                    tensors[name] = replay.select(tensor, False)
            for name, tensor in (received or {}).items():
                if name.startswith(self.AUX_HIDDEN_STATE_KEY):
                    tensors[name] = replay.select(tensor, replay.behind_source)
        if self.cut_out is not None:
            tensors[LATENT] = (received[LATENT] if self.latents is None else self.latents)[:rows]
            if self.cut_out.topk:
                tensors[TOPK] = self.topk_indices_buffer[:run]
            if self.cut_out.candidates:
                tensors[CANDIDATES] = self.candidate_block_buffer[:run]

    def load_weights(self, weights) -> set[str]:
        """Upstream's, with the source's tensors offered to the shadow before they are passed over as another stage's."""
        if self.shadow is None:
            return super().load_weights(weights)
        source, loaded = f"layers.{self.cut_in.kv_source}.attn.", set()

        def offered():
            for name, weight in weights:
                if name.startswith(source) and (own := self.shadow.load(name.removeprefix(source), weight)):
                    loaded.add(f"shadow.{own}")
                yield name, weight

        return super().load_weights(offered()) | loaded
