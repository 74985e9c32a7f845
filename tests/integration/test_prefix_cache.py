# SPDX-License-Identifier: Apache-2.0
"""What patches 0390 and 0410 report of the prefix cache, and how the cache fares under agents' conversations."""

import re
from pathlib import Path

import msgspec
import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.metrics.stats import PrefixCacheStats

from .cached_conversations import COMPRESSED_TOKENS, WINDOW_GROUPS, WINDOW_PAGE_TOKENS, Agents, Pool, drawn

ROOT = Path(__file__).resolve().parents[2]
COMPRESSED = (str(WINDOW_GROUPS), "mla_attention")
WINDOWS = [(str(number), "sliding_window_mla") for number in range(WINDOW_GROUPS)]


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
    pool, prompt = Pool(400, bounded_replay=False), drawn(1030, 1)
    assert ask(pool, prompt) == 0 and ask(pool, prompt) == 1024
    evict(pool, prompt, group, page)
    assert ask(pool, prompt + drawn(100, 2)) == served
    stats = pool.drain()
    assert (stats.queries, stats.hits, stats.hits_by_group) == (1130, served, alone)


def test_a_server_of_the_default_shares_one_group_and_counts_first_runs_only():
    pool, prompt = Pool(400), drawn(1030, 1)
    assert ask(pool, prompt) == 0 and ask(pool, prompt) == 1024
    request, hit = pool.start(prompt)
    request.num_preemptions = 1
    pool.manager.record_prefix_cache_stats(request, hit)
    stats = pool.drain()
    assert (stats.hits, stats.hits_by_group, stats.preempted_hits) == (2048, {COMPRESSED: 2048}, 1024)


def test_the_counts_reach_the_process_that_answers_metrics():
    stats = PrefixCacheStats(hits_by_group={COMPRESSED: 1024})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=PrefixCacheStats) == stats


# What docs/en/api.md shows, as keywords of `Pool`: the default, a window that is cached where a prompt ends, and one
# that is cached everywhere.
SETTINGS = ({}, {"bounded_replay": False}, {"bounded_replay": False, "retention_tokens": None})
PAGES, TALK_PAGES, ROUNDS, STRANGER = 600, 16, 14, drawn(4096, "stranger")


def hit_rate(share: float, shuffled: bool, **setting) -> float:
    """The last round's, of conversations that fill a share of the pool then; half way a stranger's prompt comes by."""
    pool = Pool(PAGES, **setting)
    agents = Agents(pool, round(share * PAGES / TALK_PAGES), 2 * COMPRESSED_TOKENS, COMPRESSED_TOKENS, shuffled)
    for number in range(ROUNDS):
        rate = agents.round()
        if number == ROUNDS // 2 - 1:
            assert ask(pool, STRANGER) == 0
    assert {len(talk) for talk in agents.talks} == {TALK_PAGES * COMPRESSED_TOKENS}
    return rate


def documented(page: str) -> list[list[str]]:
    """The rows of hit rates of docs/<page>: "50 %", then a rate for each setting, shuffled and in turn."""
    text = (ROOT / "docs" / page).read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"\| \d+ % \|.*\|", text)]


def test_hit_rates_of_the_document():
    """Conversations that fit keep their hits, by default; one cold prompt ends them where windows are cached, and so
    does a share of the pool above one everywhere."""
    rows = documented("en/api.md")
    assert [row[0] for row in rows] == ["25 %", "50 %", "75 %", "90 %", "100 %", "125 %"]
    assert rows == documented("zh/api.md")
    for percent, *rates in rows:
        share = int(percent.split()[0]) / 100
        assert rates == [f"{hit_rate(share, order, **setting):.2f}" for setting in SETTINGS for order in (True, False)]


def test_one_cold_prompt_ends_all_hits_where_windows_are_cached():
    """Ten conversations in a fifth of the pool; all is well until the stranger comes, and never again after it."""
    kept, default = (Pool(1000, **setting) for setting in (SETTINGS[2], SETTINGS[0]))
    agents = {pool: Agents(pool, 10, 128, 128, shuffled=False) for pool in (kept, default)}
    before = {pool: [each.round() for _ in range(20)][-1] for pool, each in agents.items()}
    assert before[kept] == before[default] > 0.94
    for pool in agents:
        assert ask(pool, STRANGER) == 0
    after = {pool: [each.round() for _ in range(20)] for pool, each in agents.items()}
    assert max(after[kept]) == 0 and min(after[default]) > 0.94
