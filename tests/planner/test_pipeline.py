# SPDX-License-Identifier: Apache-2.0
"""Partitions, the cuts that need no relay, and the bytes that cross every cut."""

import re
from pathlib import Path

import pytest

from vllm.ampere.errors import UsageError
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.pipeline import (
    copied_source, crossing_bytes, describe, even, payload_bytes, plain_cuts, plain_partitions, relay_latents, relays,
    sent_bytes, stages,
)

SPEC = ModelSpec()


def test_plain_cuts():
    assert plain_cuts(SPEC) == (1, 2, 8, 14, 20)


def test_plain_partitions():
    assert (20, 20) in plain_partitions(SPEC, 2) and len(plain_partitions(SPEC, 2)) == 5
    assert (8, 12, 20) in plain_partitions(SPEC, 3) and len(plain_partitions(SPEC, 3)) == 10
    assert plain_partitions(SPEC, 6) == [(1, 1, 6, 6, 6, 20)]
    assert plain_partitions(SPEC, 7) == []


def test_even_partition_is_the_engines():
    assert [even(40, count) for count in (1, 2, 3, 6)] == [(40,), (20, 20), (13, 14, 13), (6, 7, 7, 7, 7, 6)]


@pytest.mark.parametrize("partition", [(), (20, 21), (40, 0), (10, 10)])
def test_a_partition_must_deal_out_all_layers(partition):
    with pytest.raises(UsageError, match="does not deal out 40 layers"):
        stages(SPEC, partition)


def test_relays_are_described():
    assert relays(SPEC, (8, 12, 20)) == ()
    assert [describe(cut) for cut in relays(SPEC, (13, 14, 13))] == [
        "layer 13 takes layer 8's latent, top-k from the stage before",
        "layer 27 takes layer 20's latent, candidates, top-k from the stage before",
    ]


@pytest.mark.parametrize(
    "partition, copied, latents",
    [
        ((20, 20), [None, None], [0, 0]),
        ((14, 14, 12), [None, None, (20, True)], [0, 1, 1]),
        # A stage between passes on what it was sent.
        ((14, 7, 3, 16), [None, None, (20, False), (20, True)], [0, 1, 1, 1]),
        ((37, 3), [None, (20, False)], [1, 1]),
        # Of layer 8 it is sent latents, of layer 20 it sends its own.
        ((13, 14, 13), [None, (8, False), (20, True)], [1, 2, 1]),
    ],
)
def test_copies_and_latents_of_every_stage(partition, copied, latents):
    cut = stages(SPEC, partition)
    assert [copied_source(SPEC, stage) for stage in cut] == copied
    assert [relay_latents(SPEC, stage) for stage in cut] == latents


def test_the_document_has_every_kind_of_cut():
    """The table of docs/en/pipeline.md, row by row, and every layer in one of them."""
    text = (Path(__file__).resolve().parents[2] / "docs/en/pipeline.md").read_text()
    block = re.search(r"^a stage starts at .*?\n(.*?)\n```", text, re.M | re.S)[1]
    found = {}
    for line in block.splitlines():
        starts, crosses, copied = re.split(r" {2,}", line)
        for word in starts.split(", "):
            first, _, last = word.partition("-")
            found |= {start: (crosses, copied) for start in range(int(first), int(last or first) + 1)}
    assert sorted(found) == list(range(1, 40))
    for start, (crosses, copied) in found.items():
        (cut,) = relays(SPEC, (start, 40 - start)) or (None,)
        if cut is None:
            assert (crosses, copied) == ("nothing", "nothing")
        else:
            assert describe(cut) == f"layer {start} takes layer {copied.split()[-1]}'s {crosses} from the stage before"


def test_streams_only():
    """relay_design section 6: 40,976 a token, 246 KB for six rows, 335.7 MB for a chunk of 8192."""
    for start in (0, *plain_cuts(SPEC)):
        assert payload_bytes(SPEC, start, draft=True) == {"hidden_states": 40_960, "pre_mix": 16}
    assert round(crossing_bytes(SPEC, 20, True, rows=6) / 1e3) == 246
    assert round(crossing_bytes(SPEC, 20, True, rows=8192) / 1e6, 1) == 335.7


@pytest.mark.parametrize(
    "start, names",
    [
        (28, {"relay_latent": 1024, "relay_candidates": 8192}),
        (27, {"relay_latent": 1024, "relay_candidates": 8192, "relay_topk": 2048}),
        (37, {"relay_latent": 1024, "relay_topk": 2048, "aux_hidden_states_0": 10_240}),
        (39, {"relay_latent": 1024, "relay_topk": 2048} | {f"aux_hidden_states_{tap}": 10_240 for tap in range(3)}),
        (9, {"relay_latent": 1024, "relay_topk": 2048}),
    ],
)
def test_a_relayed_token_by_tensor(start, names):
    assert payload_bytes(SPEC, start, draft=True) == {"hidden_states": 40_960, "pre_mix": 16} | names


@pytest.mark.parametrize(
    "start, rows, kept, megabytes",
    [
        # relay_design section 6: decode of 1, 8 and 32 requests with five drafted tokens; a chunk of one and of four
        # requests whose rows bounded replay trimmed, and one that it did not trim.
        (28, 6, None, 0.301), (28, 48, None, 2.41), (28, 192, None, 9.64), (28, 8192, 128, 14.7), (28, 8192, 512, 33.6),
        (28, 8192, None, 411.2),
        (27, 6, None, 0.313), (27, 48, None, 2.51), (27, 192, None, 10.0), (27, 8192, 128, 14.9), (27, 8192, 512, 34.6),
        (27, 8192, None, 428.0),
    ],
)
def test_published_payloads(start, rows, kept, megabytes):
    digits = len(str(megabytes).partition(".")[2])
    assert round(crossing_bytes(SPEC, start, True, rows, kept) / 1e6, digits) == megabytes


def test_candidates_stay_while_every_block_is_one():
    """2,048 blocks of 8 positions."""
    shorter, longer = (payload_bytes(SPEC, 28, False, context=context) for context in (16_384, 16_385))
    assert longer == shorter | {"relay_candidates": 8192} and "relay_candidates" not in shorter


def test_latents_of_trimmed_rows_cross():
    whole, trimmed = (payload_bytes(SPEC, 38, True, 8192, kept) for kept in (None, 128))
    assert trimmed.keys() == whole.keys() and len(whole) == 6
    assert {name for name in whole if trimmed[name] == whole[name]} == {"relay_latent"}
    assert all(64 * trimmed[name] == size for name, size in whole.items() if name != "relay_latent")


def test_a_rank_sends_its_share_and_row_numbers_whole():
    """relay_design section 6: 20,488 + 512 + 8,192 a token and link with two ranks."""
    assert sent_bytes(payload_bytes(SPEC, 28, True), 2) == 20_488 + 512 + 8192
    assert sent_bytes(payload_bytes(SPEC, 27, True), 4) == 10_244 + 256 + 8192 + 2048


def test_draft_features_cross_with_their_layers():
    assert crossing_bytes(SPEC, 38, draft=True) - crossing_bytes(SPEC, 38, draft=False) == 2 * 5120 * 2
