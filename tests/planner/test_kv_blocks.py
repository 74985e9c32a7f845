# SPDX-License-Identifier: Apache-2.0
"""Cache bytes and blocks, against the stock planner's figures for the released model."""

from itertools import pairwise

import pytest

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.kv_blocks import BLOCK_TOKENS, KvBlocks, token_bytes
from vllm.ampere.planner.pipeline import stages

SPEC = ModelSpec()


def blocks(partition, draft_tokens=5, batched_tokens=8192):
    return KvBlocks(SPEC, draft_tokens, (len(partition) + 1) * batched_tokens)


def widths(partition):
    return [blocks(partition).block_bytes(stage) for stage in stages(SPEC, partition)]


def test_token_bytes():
    (whole,) = stages(SPEC, (40,))
    assert token_bytes(SPEC, whole) == 1790
    assert widths((40,)) == [1800 * BLOCK_TOKENS]
    assert [token_bytes(SPEC, stage) for stage in stages(SPEC, (20, 20))] == [1074, 716]
    assert [token_bytes(SPEC, stage) for stage in stages(SPEC, (14, 14, 12))] == [716, 1074, 716]
    assert [token_bytes(SPEC, stage) for stage in stages(SPEC, (9, 28, 3))] == [716, 584 / 2 + 358 + 716, 584]


@pytest.mark.parametrize(
    "partition, expected",
    [
        ((20, 20), [138_240, 114_048]),
        ((8, 12, 20), [46_080, 92_160, 114_048]),
        ((14, 14, 12), [92_160, 138_240, 92_160]),
        ((14, 13, 13), [92_160, 138_240, 92_160]),
        # Copies of layer 8's and of layer 20's rows; the second alone without index keys.
        ((13, 14, 13), [92_160, 175_680, 92_160]),
        ((9, 11, 20), [92_160, 83_520, 114_048]),
        ((14, 7, 3, 16), [92_160, 138_240, 74_880, 95_040]),
        ((37, 3), [230_400, 74_880]),
        ((3, 37), [46_080, 221_760]),
        ((7, 7, 7, 7, 6, 6), [46_080, 83_520, 138_240, 92_160, 92_160, 92_160]),
    ],
)
def test_block_bytes(partition, expected):
    """As vLLM's own planner gives them for layers of these names and sizes, copies under their source's name."""
    assert widths(partition) == expected


@pytest.mark.parametrize(
    "partition, weights, thousands, without",
    [((14, 14, 12), (49.5, 48.5, 46.5), (64, 50, 99), 50), ((14, 13, 13), (49.5, 45.0, 49.9), (64, 78, 59), 64)],
)
def test_a_copy_costs_where_its_stage_decides(partition, weights, thousands, without):
    """Thousands of blocks in 55 GiB a card: 8 % fewer at 14,13,13; none at 14,14,12, where the middle stage decides."""
    counts = [(55 - held) * 2**30 / width / 1e3 for held, width in zip(weights, widths(partition))]
    assert tuple(map(round, counts)) == thousands
    # Without the copy the last stage's window pages are its widest share, 76,032 bytes.
    assert round(min(*counts[:2], counts[2] * 92_160 / 76_032)) == without


def test_window_caches_of_the_release_are_four_groups():
    assert blocks((40,)).window_groups == 4


def test_request_blocks_by_hand():
    """1M tokens: 8192 compressed pages, four groups of window pages for the window and two batches, one ring."""
    window = -(-(127 + 2 * 8192) // 32) + 1
    assert blocks((40,)).request_blocks(1 << 20) == 8192 + 4 * window + 1
    assert blocks((40,)).request_blocks(1) == 1 + 4 * 2 + 1


def test_capacity_grows_with_the_context_asked_for():
    """A request's window pages are the same at every length, so longer requests waste less of the pool."""
    kv = blocks((40,))
    sizes = [kv.capacity_tokens(100_000, context) for context in (1 << 15, 1 << 17, 1 << 18, 1 << 20)]
    assert all(a < b for a, b in pairwise(sizes))
    assert sizes[2] == int(100_000 / kv.request_blocks(1 << 18) * (1 << 18))


@pytest.mark.parametrize("count", [0, 9, 10, 2100, 5000, 10_260, 10_261])
def test_longest_context_is_the_last_that_fits(count):
    kv = blocks((40,))
    longest = kv.longest_context(count)
    assert longest == 0 or kv.request_blocks(longest) <= count
    assert longest == 1 << 20 or kv.request_blocks(longest + 1) > count


def test_ring_grows_with_the_draft():
    """Three rings of 32 tokens outweigh the compressed pages of the first stage: 3 x 32 x 4096 bytes."""
    (first, _) = stages(SPEC, (20, 20))
    assert blocks((20, 20), draft_tokens=30).block_bytes(first) == 3 * 32 * 4096


def test_equal_ratios_split_window_caches_by_the_pattern():
    """Sources of one ratio repeat as a pattern of two pages; three sources, 7 window layers: groups of three."""
    spec = ModelSpec(
        num_hidden_layers=7, compress_ratios=(0,) + (1,) * 6, kv_source_layer_ids=(1, 3, 5),
        index_source_layer_ids=(1, 3, 5), candidate_source_layer_id=-1, engram_layer_ids=(), engram_num_embeddings=(),
        num_nextn_predict_layers=0, dspark_target_layer_ids=(),
    )
    kv = KvBlocks(spec, 0, 2048)
    # Candidates 3 to 7 pad (3, 7) by 2, 2, 5, 8 and 4: four wins over three.
    assert kv.window_groups == 2
