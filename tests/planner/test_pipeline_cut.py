# SPDX-License-Identifier: Apache-2.0
"""What crosses every cut of the release: relay_design's table, written out."""

import pytest

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.pipeline_cut import Cut, cut_at, keeps_last_rows, scores_keys_of

SPEC = ModelSpec()
STREAMS_ONLY = (0, 1, 2, 8, 14, 20, 40)
# Starts: (top-k crosses, candidates cross, the last stage scores keys of the source).
CROSSES = {
    (24, 28, 32, 36): (False, True, True),
    (21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35): (True, True, True),
    (37, 38, 39): (True, False, False),
    (3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 15, 16, 17, 18, 19): (True, False, False),
}


@pytest.mark.parametrize("start", STREAMS_ONLY)
def test_streams_only(start):
    assert cut_at(SPEC, start) is None


@pytest.mark.parametrize("start", [start for starts in CROSSES for start in starts])
def test_inside_a_group(start):
    topk, candidates, keys = next(crossing for starts, crossing in CROSSES.items() if start in starts)
    source = max(layer for layer in (2, 8, 14, 20) if layer < start)
    assert cut_at(SPEC, start) == Cut(start, source, topk, candidates)
    assert scores_keys_of(SPEC, start, 40, source) == keys


def test_every_start_is_in_the_table():
    assert sorted((*STREAMS_ONLY, *(start for starts in CROSSES for start in starts))) == list(range(41))


def test_a_stage_between_carries_candidates_it_does_not_use():
    assert cut_at(SPEC, 21).candidates and not scores_keys_of(SPEC, 21, 24, 20)


def test_rows_that_replay_drops_cross_up_to_the_layer_after_the_last_source():
    assert [end for end in range(41) if keeps_last_rows(SPEC, end)] == list(range(22, 40))
