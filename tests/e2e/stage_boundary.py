# SPDX-License-Identifier: Apache-2.0
"""The streams of an engine without stages, handed over as two stages do."""


def meet_before(layer: int) -> None:
    """From now on a model in this process finishes its streams before `layer`, and begins there as a stage does.

    Between two layers one kernel expands the streams and mixes them again, and upstream's reads them before they are
    rounded where up to 32 rows are in a step. A stage sends rounded ones.
    """
    from vllm.models.deepseek_v41.nvidia import model

    run = model.DeepseekV4Model._run_layers

    def parted(self, layers, streams, positions, ids, pre, post, comb, residual, taps, *others):
        if not layers.start < layer <= layers.stop:
            return run(self, layers, streams, positions, ids, pre, post, comb, residual, taps, *others)
        before = range(layers.start, layer)
        y, residual, post, comb, pre = run(self, before, streams, positions, ids, pre, post, comb, residual, taps, *others)
        streams = model.mhc_post_tilelang(y, residual, post, comb)
        if layer in self.aux_hidden_state_layers:
            taps[layer] = streams.mean(dim=1)
        return run(self, range(layer, layers.stop), streams, positions, ids, pre, None, None, None, taps, *others)

    model.DeepseekV4Model._run_layers = parted
