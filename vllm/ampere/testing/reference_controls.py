# SPDX-License-Identifier: Apache-2.0
"""Reference decoders with one rule broken each.

A comparison says something about a rule only if it can tell the right decoder from the one that breaks it.
"""

import math
from dataclasses import replace
from typing import Any, Callable

import torch

from ..model_spec import ModelSpec
from .reference_decoder import ReferenceDecoder
from .reference_rounding import FLOAT32, exact


class NoSink(ReferenceDecoder):
    def sink(self, p):
        return torch.full_like(super().sink(p), -math.inf)


class NoEngram(ReferenceDecoder):
    def engram(self, layer, x, chunk):
        return x


class NoImageBias(ReferenceDecoder):
    def routing_bias(self, p, image):
        return super().routing_bias(p, torch.zeros_like(image))


class NoRoutingBias(ReferenceDecoder):
    def routing_bias(self, p, image):
        return torch.zeros_like(super().routing_bias(p, image))


class NoCacheRounding(ReferenceDecoder):
    def __init__(self, spec, weights, token_classes=(), rounding=FLOAT32):
        super().__init__(spec, weights, token_classes, replace(rounding, window=exact, compressed=exact, index=exact))


class UndelayedMix(ReferenceDecoder):
    """Each sublayer collapses with the mix that it predicts itself."""

    def block(self, p, x, pre, attend, feed):
        self.next_site = [p + "hc_attn", p + "hc_ffn"]
        return super().block(p, x, pre, attend, feed)

    def collapse(self, x, pre):
        if self.next_site:
            pre = self.mix(x, self.next_site.pop(0))[0]
        return super().collapse(x, pre)


class MainRopeEverywhere(ReferenceDecoder):
    def rotate(self, x, positions, compress, inverse=False):
        return super().rotate(x, positions, False, inverse)


class NoInverseRope(ReferenceDecoder):
    def rotate(self, x, positions, compress, inverse=False):
        return x if inverse else super().rotate(x, positions, compress)


def _changed(change: Callable[[ModelSpec], dict[str, Any]]) -> Callable[..., ReferenceDecoder]:
    def make(spec: ModelSpec, *arguments, **named) -> ReferenceDecoder:
        return ReferenceDecoder(replace(spec, **change(spec)), *arguments, **named)

    return make


# Name -> what makes the broken decoder, from the arguments of `ReferenceDecoder`.
CONTROLS: dict[str, Callable[..., ReferenceDecoder]] = {
    "no_sink": NoSink,
    "no_engram": NoEngram,
    "no_image_bias": NoImageBias,
    "no_routing_bias": NoRoutingBias,
    "no_cache_rounding": NoCacheRounding,
    "undelayed_mix": UndelayedMix,
    "main_rope_everywhere": MainRopeEverywhere,
    "no_inverse_rope": NoInverseRope,
    "no_selection": _changed(lambda s: {"index_topk": s.max_position_embeddings}),
    "fewer_selected": _changed(lambda s: {"index_topk": s.index_topk * 3 // 4}),
    "shorter_window": _changed(lambda s: {"sliding_window": s.sliding_window - 1}),
    "no_candidates": _changed(lambda s: {"candidate_source_layer_id": -1}),
    "no_swiglu_limit": _changed(lambda s: {"swiglu_limit": math.inf}),
    "fewer_sinkhorn_steps": _changed(lambda s: {"hc_sinkhorn_iters": 2}),
}
