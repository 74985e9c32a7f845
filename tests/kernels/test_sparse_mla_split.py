# SPDX-License-Identifier: Apache-2.0
"""The split rule of sparse attention, pinned: how many programs a decode step starts is part of its numerics."""

import pytest

from vllm.ampere.arch import SM80, SM86
from vllm.ampere.kernels.attention.sparse_mla_triton import split_count

WINDOW, BOTH = 128, 128 + 512


@pytest.mark.parametrize("tokens, heads, keys, sm80, sm86", [
    (1, 8, BOTH, 40, 40),
    (1, 8, WINDOW, 8, 8),
    (1, 64, BOTH, 40, 40),
    (6, 8, BOTH, 40, 40),
    (8, 16, BOTH, 27, 21),
    (32, 8, BOTH, 13, 10),
    (32, 64, BOTH, 3, 2),
    (96, 64, WINDOW, 1, 1),
    (108, 8, BOTH, 4, 3),
    (109, 8, BOTH, 3, 3),
    (4096, 64, BOTH, 1, 1),
    (1, 8, 1, 1, 1),
    (1, 8, 0, 1, 1),
    (1, 8, 17, 2, 2),
])  # fmt: skip
def test_split_rule(tokens, heads, keys, sm80, sm86):
    assert split_count(tokens, heads, keys, SM80.multiprocessors) == sm80
    assert split_count(tokens, heads, keys, SM86.multiprocessors) == sm86


def test_no_split_has_less_than_a_tile_and_no_step_more_programs_than_fill_the_card():
    for tokens in range(1, 300):
        for heads, blocks in ((8, 1), (16, 1), (32, 1), (64, 2)):
            splits = split_count(tokens, heads, BOTH, SM80.multiprocessors)
            assert 1 <= splits <= BOTH // 16
            most = (4 if heads <= 8 else 2) * SM80.multiprocessors
            assert splits == 1 or splits * tokens * blocks <= most
