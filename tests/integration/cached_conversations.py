# SPDX-License-Identifier: Apache-2.0
"""Agents' conversations against vLLM's cache manager with the groups of the released model, and no model behind it."""

import random

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.request import Request

init_none_hash(sha256)
# Tokens of a page of compressed rows and of the window; the window, and groups of layers that have one.
COMPRESSED_TOKENS, WINDOW_PAGE_TOKENS, WINDOW_TOKENS, WINDOW_GROUPS = 128, 32, 128, 4
# Tokens of a step of prefill, requests that run together, and tokens of an answer.
STEP_TOKENS, AT_ONCE, SAID_TOKENS = 512, 2, 8


def cache_groups(bounded_replay: bool) -> list[KVCacheGroupSpec]:
    """Cache groups as a server of the released model logs them: pages of 32, 32, 32, 32, 128 and 8 tokens."""
    rows = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    window = SlidingWindowMLASpec(
        block_size=WINDOW_PAGE_TOKENS, sliding_window=WINDOW_TOKENS, bounded_replay=bounded_replay, **rows
    )
    return [
        *(KVCacheGroupSpec([f"window {number}"], window) for number in range(WINDOW_GROUPS)),
        KVCacheGroupSpec(["compressed"], MLAAttentionSpec(block_size=COMPRESSED_TOKENS, **rows)),
        KVCacheGroupSpec(["ring"], CircularBufferSpec(block_size=8, **rows)),
    ]


class Pool:
    """A pool of pages, and requests that take and leave them as a server's do.

    Attributes:
        manager: vLLM's.
    """

    def __init__(self, pages: int, bounded_replay: bool = True, retention_tokens: int | None = 0):
        """Args: retention_tokens: `--prefix-cache-retention-interval`; None keeps every page of the window."""
        self._window_tokens = WINDOW_TOKENS if bounded_replay else 0
        hash_tokens = COMPRESSED_TOKENS if bounded_replay else WINDOW_PAGE_TOKENS
        groups = cache_groups(bounded_replay)
        self.manager = KVCacheManager(
            KVCacheConfig(pages, [], groups, prefix_cache_retention_interval=retention_tokens),
            max_model_len=1 << 20,
            scheduler_block_size=COMPRESSED_TOKENS,
            hash_block_size=hash_tokens,
            max_in_flight_tokens=2 * STEP_TOKENS,
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(hash_tokens, sha256)
        self._served = 0

    def start(self, tokens: list[int]) -> tuple[Request, int]:
        """A request that has been prefilled, and how many tokens of it the cache had."""
        self._served += 1
        settings = SamplingParams(max_tokens=SAID_TOKENS)
        request = Request(str(self._served), list(tokens), settings, None, block_hasher=self._hasher)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        if hit <= self._window_tokens:  # the window is computed again, so nothing would be saved
            blocks, hit = None, 0
        self.manager.record_prefix_cache_stats(request, hit)
        adopted = hit
        while request.num_computed_tokens < len(tokens):
            chunk = min(STEP_TOKENS, len(tokens) - max(adopted, request.num_computed_tokens))
            assert self.manager.allocate_slots(request, chunk, adopted, blocks) is not None, "the pool is too small"
            request.num_computed_tokens += adopted + chunk
            blocks, adopted = None, 0
        return request, hit

    def finish(self, request: Request, said: list[int]) -> None:
        """Generate an answer's tokens and leave."""
        for token in said:
            request.append_output_token_ids(token)
            assert self.manager.allocate_slots(request, 1) is not None, "the pool is too small"
            request.num_computed_tokens += 1
        self.manager.free(request)

    def drain(self):
        """vLLM's prefix-cache statistics since the last call."""
        return self.manager.make_prefix_cache_stats()


def drawn(count: int, seed: int | str) -> list[int]:
    """Token ids that no other seed gives."""
    source = random.Random(seed)
    return [source.randrange(1 << 30) for _ in range(count)]


class Agents:
    """Conversations that take their turns round by round and grow with each.

    Attributes:
        talks: the tokens of each.
    """

    def __init__(self, pool: Pool, count: int, begin_tokens: int, turn_tokens: int, shuffled: bool = True):
        """Args: turn_tokens: what a turn adds, the last `SAID_TOKENS` of it by the model; shuffled: each round anew."""
        self._pool, self._turn_tokens, self._shuffled = pool, turn_tokens, shuffled
        self._source = random.Random(count)
        self.talks = [drawn(begin_tokens, f"talk {number}") for number in range(count)]

    def round(self) -> float:
        """A turn of each, `AT_ONCE` at a time; the hit rate: tokens that the cache had over tokens asked."""
        order = self._source.sample(self.talks, len(self.talks)) if self._shuffled else self.talks
        hits = asked = 0
        for first in range(0, len(order), AT_ONCE):
            running = []
            for talk in order[first : first + AT_ONCE]:
                talk += drawn(self._turn_tokens - SAID_TOKENS, self._source.random())
                request, hit = self._pool.start(talk)
                hits, asked = hits + hit, asked + len(talk)
                running.append((request, talk))
            for request, talk in running:
                said = drawn(SAID_TOKENS, self._source.random())
                self._pool.finish(request, said)
                talk += said
        return hits / asked
