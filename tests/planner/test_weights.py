# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, against the published arithmetic and against counts written out here by hand."""

import pytest

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.pipeline import stages
from vllm.ampere.planner.weights import host_bytes

GIB = 2**30


def ranks(table, tensor, partition, expert_parallel=False, draft=True, images=True):
    cut = stages(table.spec, partition)
    return [table.rank(stage, tensor, expert_parallel, draft, images) for stage in cut]


def published(weights, padded):
    """What model_spec section 14 counts: without decoding wo_a, without the draft's own token embedding."""
    size = weights.total - weights.wo_a_bf16 - weights.draft_embed
    return (size if padded else size - weights.expert_padding) / GIB


def test_all_tensors(table):
    assert table.tensor_bytes == 510_286_023_000


@pytest.mark.parametrize(
    "tensor, partition, stored, padded",
    [
        (8, (40,), [36.7], [38.0]),
        (8, (20, 20), [17.9, 18.8], [18.5, 19.5]),
        # 37.046: the published 37.1 is 37.05 rounded once more.
        (4, (20, 20), [35.3, 37.05], [35.3, 37.05]),
        (2, (8, 12, 20), [28.8, 41.5, 73.5], [28.8, 41.5, 73.5]),
        (2, (14, 13, 13), [49.5, 45.0, 49.3], [49.5, 45.0, 49.3]),
        (2, (14, 14, 12), [49.5, 48.4, 45.9], [49.5, 48.4, 45.9]),
        (4, (14, 6, 20), [24.9, 10.5, 37.05], [24.9, 10.5, 37.05]),
    ],
)
def test_published_figures(table, tensor, partition, stored, padded):
    held = ranks(table, tensor, partition)
    for figures, with_padding in ((stored, False), (padded, True)):
        digits = [len(str(figure).partition(".")[2]) for figure in figures]
        assert [round(published(w, with_padding), n) for w, n in zip(held, digits)] == figures


def test_without_the_draft(table):
    (held,) = ranks(table, 8, (40,), draft=False)
    assert round(published(held, False), 1) == 35.5
    assert round(published(held, True), 1) == 36.8
    assert held.draft == held.draft_embed == 0


def test_experts_by_hand(table):
    """One expert is three matrices of 2304 x 5120 codes of half a byte and one scale byte for 32."""
    expert = 3 * 2304 * 5120 * 17 // 32
    (sliced,) = ranks(table, 8, (40,), draft=False)
    assert sliced.experts == 40 * 384 * expert // 8
    assert sliced.expert_padding * 27 == sliced.experts  # a third of an expert, from 288 to 320
    (whole,) = ranks(table, 8, (40,), expert_parallel=True)
    assert whole.experts == 40 * 48 * expert
    assert whole.expert_padding == 0
    (quarter,) = ranks(table, 4, (40,), draft=False)
    assert quarter.expert_padding == 0  # 576 is nine of Marlin's 64
    assert ranks(table, 2, (40,))[0].expert_padding == 0


def test_a_rank_of_tp8_with_the_draft(table):
    """Upstream's rule, 384 for all three matrices, made it 48.2 GiB by the same count."""
    (held,) = ranks(table, 8, (40,))
    assert published(held, True) < 38.0
    assert round(published(held, False) + (held.experts + 3 * 128 * 3 * 288 * 5120 * 17 // 32) / 3 / GIB, 1) == 48.2


def test_dense_layer_by_hand(table):
    """Layer 0 at TP8, tensor by tensor, as the engine holds it."""
    one = table.rank(stages(table.spec, (1, 39))[0], 8, False, True, False)
    hidden, scaled = 5120, 33 / 32
    replicated = (1280 + 512) * hidden * scaled
    sharded = (32768 // 8 * 1280 + hidden * 8192 // 8 + 2 * 288 * hidden) * scaled
    down = hidden * 320 * scaled  # 288 inputs padded to Marlin's 64
    wo_a = 1024 * 4096 * scaled
    small = 2 * (24 * 20480 + 24 + 3) * 4 + 2 * (2 * hidden + 1280 + 512) + 64 * 4 + 384 * hidden * 2 + 2 * 384 * 4
    assert one.dense == replicated + sharded + down + wo_a + small
    assert one.wo_a_bf16 == 2 * 1024 * 4096 - wo_a
    assert one.embed == 129280 // 8 * hidden * 2


def test_decoding_wo_a(table):
    assert round(ranks(table, 8, (40,), draft=False)[0].wo_a_bf16 / GIB, 2) == 0.15
    assert round(ranks(table, 2, (8, 12, 20))[2].wo_a_bf16 / GIB, 2) == 0.35


def test_draft_brings_its_own_embedding_to_a_last_stage_only(table):
    first, last = ranks(table, 2, (20, 20))
    assert (first.draft_embed, last.draft_embed) == (0, first.embed)
    assert round(last.draft_embed / GIB, 2) == 0.62
    assert ranks(table, 8, (40,))[0].draft_embed == 0


def test_a_copy_of_a_source_brings_its_index_key_weights_where_keys_are_copied(table):
    """A bfloat16 matrix of 128 x 512 and a norm of 128, on every rank: 128 KiB and 256 bytes."""
    for partition, expected in (((14, 14, 12), [0, 0, 131_328]), ((13, 24, 3), [0, 0, 0]), ((20, 20), [0, 0])):
        assert [held.relay for held in ranks(table, 2, partition)] == expected


def test_vision_and_head_go_to_the_ends(table):
    first, last = ranks(table, 4, (20, 20))
    assert first.vision and not last.vision
    assert last.head and not first.head
    assert ranks(table, 4, (20, 20), images=False)[0].vision == 0


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_engram_on_the_host(tensor):
    spec = ModelSpec()
    first, last = stages(spec, (20, 20))
    assert round(host_bytes(spec, first, tensor, huge_pages=False) / GIB) == 264
    assert round(host_bytes(spec, first, tensor, huge_pages=True) / GIB, 1) == 188.8
    assert host_bytes(spec, last, tensor, huge_pages=True) == 0


def test_engram_tables_follow_their_layers():
    spec = ModelSpec()
    sizes = [host_bytes(spec, stage, 2, True) / GIB for stage in stages(spec, (8, 12, 20))]
    assert [round(size, 1) for size in sizes] == [94.4, 94.4, 0]
