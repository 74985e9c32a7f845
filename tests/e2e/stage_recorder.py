# SPDX-License-Identifier: Apache-2.0
"""Mixed into every worker (`worker_extension_cls`): what a stage reads and sends, and what the draft reads and says."""

import hashlib
from functools import partial
from itertools import pairwise

import torch

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    shown = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(shown + tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


class StageRecorder:
    """Methods of a worker, called through `collective_rpc`."""

    def record_stage(self) -> dict:
        """Start recording; returns what this stage consists of.

        Keys: `groups`, the layers of each cache group that live here; `layers` (first, last + 1); `replay_start`, the
        layer at which bounded replay begins here, or None; `engrams`, its engram layers; `draft_embedding`, the digest
        of the draft's token embedding, or None; `in_place`, what it receives right where its layers read it;
        `custom_all_reduce`, vLLM's own kernel sums over the tensor group.
        """
        from vllm.distributed import get_tp_group

        self.recorded, self.spoiled = self._nothing(), None
        runner = self.model_runner
        model, speculator = runner.model.get_language_model().model, runner.speculator
        runner.model.register_forward_pre_hook(self._read, with_kwargs=True)
        execute = runner.execute_model
        runner.execute_model = lambda *args, **kwargs: self._send(execute(*args, **kwargs))
        if speculator is not None:
            speculator.propose = self._proposing(speculator.propose, model.config.sliding_window)
        own, self.layer = range(model.start_layer, model.end_layer), "outside"
        communicator, graphs = get_tp_group().device_communicator, getattr(runner, "cudagraph_manager", None)
        if communicator is not None and runner.model_config.enforce_eager:  # a graph runs no Python
            for number in own:
                model.layers[number].register_forward_pre_hook(partial(self._in_layer, number))
                model.layers[number].register_forward_hook(partial(self._in_layer, "outside"))
            for name in COLLECTIVES:
                setattr(communicator, name, self._counting(name, getattr(communicator, name)))
        if graphs is not None:
            graphs.run_fullgraph = self._noting("FULL", graphs.run_fullgraph)
            graphs.run_pw_graph = self._noting("PIECEWISE", graphs.run_pw_graph)
        received = runner.intermediate_tensors.tensors if runner.intermediate_tensors is not None else {}
        read = {tensor.data_ptr() for tensor in (model.topk_indices_buffer, model.candidate_block_buffer)}
        self.start = own.start
        return {
            "groups": [group.layer_names for group in runner.kv_cache_config.kv_cache_groups],
            "layers": (own.start, own.stop),
            "replay_start": model.decoder_replay_start if model.decoder_replay_layers else None,
            "engrams": [layer for layer in own if model.layers[layer].engram is not None],
            "draft_embedding": digest(speculator.model.model.embed_tokens.weight) if speculator is not None else None,
            "in_place": {name for name, tensor in received.items() if tensor.data_ptr() in read},
            "custom_all_reduce": not getattr(getattr(communicator, "ca_comm", None), "disabled", True),
        }

    @staticmethod
    def _nothing() -> dict:
        return {"read": [], "sent": [], "drafts": [], "graphs": [], "collectives": []}

    def _in_layer(self, layer, *_):
        self.layer = layer

    def _counting(self, name, collective):
        def counting(tensor, *args, **kwargs):
            self.recorded["collectives"].append((self.layer, name, tuple(tensor.shape)))
            return collective(tensor, *args, **kwargs)

        return counting

    def _noting(self, mode, run):
        def noting(*args, **kwargs):
            self.recorded["graphs"].append(mode)
            return run(*args, **kwargs)

        return noting

    def _read(self, model, args, given):
        lookback = given.get("lookback_token_ids")
        rows = given["input_ids"].tolist(), given["positions"].tolist()
        self.recorded["read"].append((*rows, None if lookback is None else lookback.tolist()))
        if given.get(self.spoiled) is not None and self.start:
            given = given | {self.spoiled: given[self.spoiled].clone()}
            given[self.spoiled][0] = 7
        return args, given

    def _send(self, output):
        """`output` of the runner: what goes to the next stage, features of earlier stages included."""
        if hasattr(output, "tensors"):
            tensors = output.tensors
            sent = {name: (str(t.dtype), tuple(t.shape), t.nbytes) for name, t in tensors.items()}
            self.recorded["sent"].append(sent)
            if self.spoiled in tensors:
                tensors[self.spoiled] = tensors[self.spoiled].clone()
                # Once is as good as twice: a stage between hands on what the one before spoiled.
                tensors[self.spoiled][-1] = -tensors[self.spoiled][-1].abs()
        return output

    def _proposing(self, propose, window):
        def proposing(batch, metadata, slots, hidden, taps, *args, **kwargs):
            drafts = propose(batch, metadata, slots, hidden, taps, *args, **kwargs)
            said = drafts.tolist() if kwargs["num_speculative_tokens"] else None
            bounds = batch.query_start_loc_np[: batch.num_reqs + 1].tolist()
            # Bounded replay leaves out older rows of the taps behind it, and the draft sees no older ones.
            rows = [row for start, end in pairwise(bounds) for row in range(max(start, end - window), end)]
            self.recorded["drafts"].append((list(batch.req_ids), [digest(tap[rows]) for tap in taps], said))
            return drafts

        return proposing

    def spoil_stage(self, name: str | None) -> None:
        """From now on make the last row of this tensor negative where a stage sends it, or put token 7 into its first row
        where a later stage reads it (`input_ids`, `lookback_token_ids`). None ends it."""
        self.spoiled = name

    def take_stage(self) -> dict:
        """What was recorded since the last call, an entry a step in each list.

        Keys: `read`, (token ids, positions, look-back ids or None) of the step; `sent`, name -> (dtype, shape, bytes);
        `drafts`, (requests, digest of the rows of each tap that the draft may see, drafted tokens or None where none
        were asked for). With CUDA graphs `read` lacks the steps of a FULL one. Besides: `graphs`, the mode of each step
        in one; `collectives` of an eager tensor group, (layer or "outside", name, shape) each.
        """
        taken, self.recorded = self.recorded, self._nothing()
        return taken
