# SPDX-License-Identifier: Apache-2.0
"""What patches 0390 and 0410 report of the prefix cache, and how the cache fares under agents' conversations."""

import random

import msgspec
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from prometheus_client import CollectorRegistry, Counter
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.metrics.stats import PrefixCacheStats

from .cached_conversations import COMPRESSED_TOKENS, WINDOW_GROUPS, WINDOW_PAGE_TOKENS, Pool, rounds

COMPRESSED = (str(WINDOW_GROUPS), "mla_attention")
WINDOWS = [(str(number), "sliding_window_mla") for number in range(WINDOW_GROUPS)]


def tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1 << 30) for _ in range(count)]


def ask(pool: Pool, prompt: list[int]) -> int:
    """Serve one prompt; how many of its tokens the cache had."""
    request, hit = pool.start(prompt)
    pool.finish(request, [])
    return hit


def evict(pool: Pool, prompt: list[int], group: int, page: int) -> None:
    """Drop one page of a cached prompt from the cache: the `page`-th of its cache group."""
    manager = pool.manager
    request, _ = pool.start(prompt)
    pool.finish(request, [])
    page_tokens = manager.coordinator.single_type_managers[group].block_size
    last = (page + 1) * page_tokens // manager.block_pool.hash_block_size - 1
    key = make_block_hash_with_group_id(request.block_hashes[last], group)
    manager.evict_blocks({manager.block_pool.cached_block_hash_to_block.get_one_block(key).block_id})
    pool.drain()


@pytest.mark.parametrize("group, page, served, alone", [
    # The window's last page before the end: nothing else is kept of it, and the compressed rows serve nobody.
    (2, 1023 // WINDOW_PAGE_TOKENS, 0, {COMPRESSED: 1024} | dict.fromkeys(WINDOWS, 0)),
    # A page in the middle of the compressed rows: the window at the end is of no use.
    (WINDOW_GROUPS, 3, 0, {COMPRESSED: 384} | dict.fromkeys(WINDOWS, 1024)),
])  # fmt: skip
def test_the_group_that_ends_a_hit_shows(group, page, served, alone):
    pool, prompt = Pool(400, bounded_replay=False), tokens(1030, 1)
    assert ask(pool, prompt) == 0 and ask(pool, prompt) == 1024
    evict(pool, prompt, group, page)
    assert ask(pool, prompt + tokens(100, 2)) == served
    stats = pool.drain()
    assert (stats.queries, stats.hits, stats.hits_by_group) == (1130, served, alone)
