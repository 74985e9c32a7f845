# SPDX-License-Identifier: Apache-2.0
"""The reference decoder with bounded replay: it leaves out of the windows what the engine leaves out.

With `swa_bounded_replay` the engine keeps window rows out of the prefix cache and computes fewer of them:
* after a prefix hit it runs the last window of cached tokens again. Their rows start from an empty window, and
  compressed rows stay as cached;
* in a prefill step longer than the window, the layers after the last KV source see the step's last window of rows
  only, and nothing older in their windows.
Both change the result, by more than rounding does, so the reference has to do the same.
"""

import torch

from vllm.ampere.cache_layout import HEAD_DIM
from vllm.ampere.testing.reference_decoder import ReferenceDecoder


class Replaying(ReferenceDecoder):
    """Mixed into a decoder by `replaying`; a chunk given to `step` is one engine step of the request."""

    def attention(self, layer, u, state, chunk):
        out, width = super().attention(layer, u, state, chunk), self.spec.sliding_window
        if layer.index == self.spec.kv_source_layer_ids[-1] and len(out) > width:
            out = out[-width:]
            chunk.positions, chunk.image, chunk.selected = chunk.positions[-width:], chunk.image[-width:], chunk.selected[-width:]
            if chunk.candidates is not None:
                chunk.candidates = chunk.candidates[-width:]
            self._forget_windows(state, layer.index + 1)
        return out

    def expand(self, y, x, post, comb):
        kept = len(y)
        return super().expand(y, x[-kept:], post[-kept:], comb[-kept:])

    def collapse(self, x, pre):
        return super().collapse(x, pre[-len(x) :])

    def compress(self, layer, u, state):
        stored = len(state.compressed[layer.index]) * layer.ratio + len(state.unpaired.get(layer.index, ()))
        super().compress(layer, u[stored - state.tokens :], state)

    def draft_context(self, taps, positions, state):
        """What the draft reads does not reach the logits."""

    def _forget_windows(self, state, first_layer):
        for layer in self.spec.layers[first_layer:]:
            state.windows[f"layers.{layer.index}.attn."] = torch.zeros(0, HEAD_DIM)

    def resume(self, tokens, cached):
        """The state after a prefix hit of `cached` tokens, a window before its end."""
        state = self.start()
        self.step(state, tokens[:cached])
        self._forget_windows(state, 0)
        state.tokens = cached - self.spec.sliding_window
        before = self.token_classes[torch.tensor(tokens[: state.tokens])]
        state.history = before[-len(state.history) :]
        return state


def replaying(decoder: ReferenceDecoder) -> ReferenceDecoder:
    """The same decoder, with whatever it does differently, as `Replaying`."""
    decoder.__class__ = type(f"Replaying{type(decoder).__name__}", (Replaying, type(decoder)), {})
    return decoder


def engine_logits(decoder: ReferenceDecoder, given: list[int], generated: list[int], cached: int, step_tokens: int):
    """float32 [generated tokens, vocabulary]: what the engine computes for one request that runs alone.

    Args:
        decoder: from `replaying`, or a plain one, which then sees the whole sequence at once.
        given, generated: token ids of the prompt and of the answer.
        cached: prompt tokens served by the prefix cache.
        step_tokens: the engine's token budget of one step.
    """
    fed = given + generated[:-1]
    if not isinstance(decoder, Replaying):
        return decoder.logits(fed)[len(given) - 1 :]
    state = decoder.resume(given, cached) if cached else decoder.start()
    while state.tokens < len(given):
        last = decoder.step(state, given[state.tokens : state.tokens + step_tokens])[-1:]
    rows = [last]
    # One by one: a step of several rows would be taken for a prefill.
    rows += [decoder.step(state, [token]) for token in generated[:-1]]
    return torch.cat(rows)
