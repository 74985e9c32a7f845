# SPDX-License-Identifier: Apache-2.0
"""What crosses a pipeline cut besides the streams, for every layer that a stage may start at.

A layer of ratio > 0 reads compressed rows of its KV source and follows the selection of its index source. Where a cut
separates it from one of them, the stage before sends what the source computed, and the later stage keeps a copy of
the source's caches. Standard library only; the planner and the engine read the same rule.
"""

from dataclasses import dataclass

from .model_spec import ModelSpec

# Tensors from one stage to the next, beside those that upstream names.
LATENT, TOPK, CANDIDATES = "relay_latent", "relay_topk", "relay_candidates"
# Numbers of rows and blocks: every rank of a tensor group sends them whole, where it sends its share of the others.
SELECTIONS = (TOPK, CANDIDATES)


@dataclass(frozen=True)
class Cut:
    """What a stage that starts inside a group of layers with one KV source needs from the stage before.

    Attributes:
        start: first layer of the stage.
        kv_source: layer before it whose latents cross, one of every token: the stage writes them into its own copy
            of that layer's caches.
        topk: the first layer follows a selection made before the cut, so it crosses.
        candidates: an index source at or after the cut selects inside candidate blocks that were chosen before it.
            A stage that has no such layer itself still carries them to a later one.
    """

    start: int
    kv_source: int
    topk: bool
    candidates: bool


def cut_at(spec: ModelSpec, start: int) -> Cut | None:
    """What has to cross for a stage to start at layer `start`, 0 to the number of layers; None for streams only."""
    if not 0 < start < spec.num_hidden_layers:
        return None
    first = spec.layers[start]
    if first.kv_source is None or first.owns_kv:
        return None
    masked = any(layer.candidates == "masked" for layer in spec.layers[start:])
    return Cut(start, first.kv_source, not first.owns_index, masked and spec.candidate_source_layer_id < start)


def scores_keys_of(spec: ModelSpec, start: int, end: int, source: int) -> bool:
    """Whether a layer in [start, end) selects among the rows of `source`: the stage then needs its index keys too."""
    return any(layer.owns_index and layer.kv_source == source for layer in spec.layers[start:end])


def keeps_last_rows(spec: ModelSpec, end: int) -> bool:
    """Whether a stage that ends before layer `end` sends the rows that bounded replay keeps, and no others.

    In a long prefill step the layers after the last KV source run on each request's last window of rows. The source
    itself runs on them as well, once it has written every row's KV; a stage that ends with it sends all rows.
    """
    return spec.kv_source_layer_ids[-1] + 1 < end < spec.num_hidden_layers
