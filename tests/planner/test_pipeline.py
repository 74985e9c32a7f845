# SPDX-License-Identifier: Apache-2.0
"""Legal cuts, their reasons, and what crosses them."""

import pytest

from vllm.ampere.errors import UsageError
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.pipeline import crossing_bytes, cut_refusal, even, legal_cuts, legal_partitions, stages

SPEC = ModelSpec()


def test_legal_cuts():
    assert legal_cuts(SPEC) == (1, 2, 8, 14, 20)


@pytest.mark.parametrize("start", range(1, 40))
def test_a_refusal_names_a_layer_and_a_source_on_either_side_of_the_cut(start):
    """Found again from the lists in config.json, not from the layer map."""
    def source(ids, layer):
        return max(i for i in ids if i <= layer)

    torn = [
        layer for layer in range(start, 40)
        if SPEC.compress_ratios[layer]
        and min(source(SPEC.kv_source_layer_ids, layer), source(SPEC.index_source_layer_ids, layer)) < start
    ]
    line = cut_refusal(SPEC, start)
    assert bool(line) == bool(torn)
    if torn:
        assert f"layer {torn[0]} needs the compressed rows of layer {source(SPEC.kv_source_layer_ids, torn[0])}" in line
    assert ("relay" in line) == (start > 20)


def test_selection_is_named_where_it_is_torn_too():
    line = cut_refusal(SPEC, 30)
    assert "layer 30 needs the compressed rows of layer 20 and the selection of layer 28;" in line
    assert "selection" not in cut_refusal(SPEC, 28)


def test_legal_partitions():
    assert (20, 20) in legal_partitions(SPEC, 2) and len(legal_partitions(SPEC, 2)) == 5
    assert (8, 12, 20) in legal_partitions(SPEC, 3) and len(legal_partitions(SPEC, 3)) == 10
    assert legal_partitions(SPEC, 6) == [(1, 1, 6, 6, 6, 20)]
    assert legal_partitions(SPEC, 7) == []


def test_even_partition_is_the_engines():
    assert [even(40, count) for count in (1, 2, 3, 6)] == [(40,), (20, 20), (13, 14, 13), (6, 7, 7, 7, 7, 6)]


@pytest.mark.parametrize("partition", [(), (20, 21), (40, 0), (10, 10)])
def test_a_partition_must_deal_out_all_layers(partition):
    with pytest.raises(UsageError, match="does not deal out 40 layers"):
        stages(SPEC, partition)


def test_crossing_bytes():
    """relay_design section 6: 40,976 a token, 246 KB for six rows, 335.7 MB for a chunk of 8192."""
    token = crossing_bytes(SPEC, 20, draft=True)
    assert token == 40_976
    assert round(6 * token / 1e3) == 246
    assert round(8192 * token / 1e6, 1) == 335.7


def test_draft_features_cross_with_their_layers():
    assert crossing_bytes(SPEC, 38, draft=True) - crossing_bytes(SPEC, 38, draft=False) == 2 * 5120 * 2
