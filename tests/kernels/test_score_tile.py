# SPDX-License-Identifier: Apache-2.0
"""What the compiler makes of a tile of index scores, and how a grid is cut."""

import re
from types import SimpleNamespace

import pytest
import torch

from vllm.ampere.kernels.indexer import candidate_mqa_logits, mqa_logits, paged_mqa_logits
from vllm.ampere.kernels.indexer.score_tile import programs_a_row, words_are_aligned
from vllm.ampere.kernels.launch import unavailable
from vllm.ampere.testing.compile_check import build

from .operand_layouts import assert_decoded_before_the_exchange

LAUNCHES = [launch for module in (mqa_logits, paged_mqa_logits, candidate_mqa_logits) for launch in module.COMPILES]
needs_triton = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


@pytest.mark.compile
@needs_triton
@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_a_tile_is_decoded_once_and_each_warp_adds_whole_tokens(launch):
    layouts = build(launch, "sm80").layouts
    assert_decoded_before_the_exchange(layouts)
    # All warps along the keys: the heads of a token are added in one order, whatever is beside them.
    assert set(re.findall(r"warpsPerCTA = \[(\d+), (\d+)\], instrShape", layouts)) == {(str(launch.num_warps), "1")}
    assert len(re.findall(r"tt\.dot ", layouts)) == launch.constexprs.get("TOKENS", 1)


@needs_triton
@pytest.mark.parametrize("rows, tiles, programs", [
    (1, 1, 1), (1, 199, 199), (1, 200, 200), (1, 201, 101), (1, 8192, 200), (32, 1024, 6), (200, 9, 1), (5000, 9, 1),
])
def test_a_grid_is_bounded_by_the_card_and_shares_are_even(monkeypatch, rows, tiles, programs):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=100))
    found = programs_a_row(torch.device("cuda"), rows, tiles, 2)
    assert found == programs
    assert found <= max(1, 200 // rows)


@pytest.mark.parametrize("offset, distance, aligned", [
    (0, 128, True), (4, 132, True), (2, 128, False), (0, 131, False),
])
def test_words_are_aligned(offset, distance, aligned):
    assert words_are_aligned(torch.zeros(16, dtype=torch.uint8)[offset:], distance) == aligned
