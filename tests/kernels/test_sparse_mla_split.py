# SPDX-License-Identifier: Apache-2.0
"""The split rule of sparse attention, pinned: how many programs a decode step starts is part of its numerics; and what the
compiler makes of a tile."""

import pytest

from vllm.ampere.arch import SM80, SM86
from vllm.ampere.kernels.attention.sparse_mla_triton import COMPILES, split_count
from vllm.ampere.kernels.launch import unavailable
from vllm.ampere.testing.compile_check import build

from .operand_layouts import assert_decoded_before_the_exchange

WINDOW, BOTH = 128, 128 + 512
TILES = BOTH // 16


@pytest.mark.parametrize("tokens, heads, keys, sm80, sm86", [
    (1, 8, BOTH, 40, 40),
    (1, 8, WINDOW, 8, 8),
    (1, 64, BOTH, 40, 40),
    (2, 64, BOTH, 40, 40),
    (6, 8, BOTH, 40, 40),
    (8, 8, BOTH, 40, 20),
    (8, 16, BOTH, 20, 20),
    (32, 8, BOTH, 10, 7),
    (32, 64, BOTH, 3, 2),
    (96, 64, WINDOW, 1, 1),
    (108, 8, BOTH, 3, 2),
    (109, 8, BOTH, 2, 2),
    (4096, 64, BOTH, 1, 1),
    (1, 8, 1, 1, 1),
    (1, 8, 0, 1, 1),
    (1, 8, 17, 2, 2),
])  # fmt: skip
def test_split_rule(tokens, heads, keys, sm80, sm86):
    assert split_count(tokens, heads, keys, SM80.multiprocessors) == sm80
    assert split_count(tokens, heads, keys, SM86.multiprocessors) == sm86


def test_every_split_has_a_tile_and_no_step_more_programs_than_fill_the_card():
    for tokens in range(1, 300):
        for heads in (8, 16, 32, 64):
            splits = split_count(tokens, heads, BOTH, SM80.multiprocessors)
            share = -(-TILES // splits)
            assert share * (splits - 1) < TILES <= share * splits
            blocks = -(-heads // (16 if tokens * heads <= 64 else 32))
            most = (3 if heads <= 8 else 2) * SM80.multiprocessors
            assert splits == 1 or splits * tokens * blocks <= most


@pytest.mark.compile
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("launch", COMPILES, ids=lambda launch: launch.name)
def test_a_tile_is_decoded_once_and_staged_once(launch):
    """One buffer of the tile's bfloat16 rows serves both products: shared memory is that, the queries and, of more than 16
    heads, whose logits are spread over the warps, the weights: 48 KiB in all, or 49 of 32 heads."""
    built = build(launch, "sm80")
    assert_decoded_before_the_exchange(built.layouts)
    rows, heads = launch.constexprs["BLOCK_N"], launch.constexprs["BLOCK_H"]
    weights = rows * heads * 2 if heads > 16 else 0
    assert built.shared_bytes <= (rows + heads) * 512 * 2 + weights <= (48 << 10) + weights
