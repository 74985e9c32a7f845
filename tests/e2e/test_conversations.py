# SPDX-License-Identifier: Apache-2.0
"""Long agent conversations and a crowded pool on the CPU engine: the prefix cache serves, and nothing is lost."""

import json
import random
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import Server

from .scenarios import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.long]
TURNS = 200
# Of a turn: what the user and the tools add, and what the model says.
ADDED, SAID = 20, 8
REQUESTS = 300
# Pages of the small pool.
BLOCKS = 150
# oneDNN and PyTorch keep a compiled product for every matrix and every number of rows that a step ever had: 0.3 MiB
# each, several hundred MiB until all numbers up to the step's limit have been seen. With room for 256 they are full
# after a hundred requests. glibc keeps what was freed between pieces that live; blocks of 64 KiB and more go back to
# the system here. What grows from then on is a leak, and this is the most of it, in MiB.
ONLY_LEAKS_GROW = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256", "MALLOC_ARENA_MAX": "1",
                   "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
GROWTH_MIB = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint.write(tmp_path_factory.mktemp("conversations") / "sharp", "sharp")


def serve(checkpoint, tmp_path, env=None, **options) -> Server:
    return Server(checkpoint, tmp_path, {"enable_prompt_tokens_details": True, **options}, env, limit_s=600)


def steps(server: Server) -> tuple[int, int]:
    """What the log says at start: the step of hits and the smallest prompt that can hit, in tokens."""
    return tuple(
        map(
            int,
            re.search(
                r"hits come in steps of (\d+) tokens, and the smallest prompt that can hit has (\d+)",
                server.log.read_text(),
            ).groups(),
        )
    )


def test_a_conversation_of_two_hundred_turns(checkpoint, tmp_path):
    """Each turn is served all that the turn before left in whole pages, and a request that is sent again hits."""
    with serve(checkpoint, tmp_path, max_model_len=TURNS * (ADDED + SAID) + 64) as server:
        step, smallest = steps(server)
        short, long = prompt(smallest - 1, 8), prompt(smallest, 9)
        assert [server.complete(given, 1, logprobs=False).cached_tokens for given in (short, short, long, long)] == [
            0,
            0,
            0,
            smallest - 1,
        ]
        talk, known = [], 0
        for turn in range(TURNS):
            talk += prompt(ADDED, 1000 + turn)
            answer = server.complete(talk, SAID, logprobs=False)
            assert answer.cached_tokens == (known // step * step if known >= smallest - 1 else 0), turn
            # The last token that was said has no row yet.
            known = len(talk) + SAID - 1
            talk += answer.tokens
        again = server.complete(talk[:-SAID], SAID, logprobs=False)
        assert again.cached_tokens == (len(talk) - SAID - 1) // step * step
        assert again.tokens == talk[-SAID:]


def test_more_conversations_than_the_pool_holds(checkpoint, tmp_path):
    """Conversations that fit hit in every turn; a few too many, and nobody does, turn after turn (docs/en/api.md)."""
    # Pages of the pool, about 100 of which windows take while a request runs; pages of a conversation.
    pages, held = 124, 6

    def turns(server, talks):
        """Tokens that the cache had for the next turn of each, one after the other."""
        served = []
        for talk in talks:
            talk += prompt(ADDED, len(talk))
            answer = server.complete(talk, 1, logprobs=False)
            served.append(answer.cached_tokens)
            talk += answer.tokens
        return served

    options = {"max_model_len": 1024, "max_num_seqs": 1, "max_num_batched_tokens": 128}
    with serve(checkpoint, tmp_path, num_gpu_blocks_override=pages, **options) as server:
        step, _ = steps(server)
        talks = [prompt(held * step, 5000 + number) for number in range(pages // held + 1)]
        few = talks[:2]
        assert turns(server, few) == [0] * len(few)
        assert turns(server, few) == turns(server, few) == [held * step] * len(few)
        turns(server, talks)
        hits = server.metric("vllm:prefix_cache_group_hits_total")
        assert turns(server, talks) == [0] * len(talks)
        assert server.metric("vllm:prefix_cache_group_hits_total") == hits


def give_up(server: Server, given: list[int]) -> None:
    """Ask for a long answer and leave after its first piece."""
    body = {"model": str(server._checkpoint), "prompt": given, "max_tokens": 200, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.base_url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.readline()


def resident_mib(server: Server) -> list[int]:
    """Of the API server, the engine core and the worker, and what else they started."""
    process = psutil.Process(server._child.pid)
    return [one.memory_info().rss >> 20 for one in [process, *process.children(recursive=True)]]


def test_a_pool_that_preempts_loses_nothing(checkpoint, tmp_path):
    """300 requests, eight at once, one in eight given up, in a pool that holds about two of the long ones."""
    source = random.Random(300)

    def ask(server, number):
        given, wanted = prompt(source.choice((20, 60, 130, 280)), number), source.choice((1, 4, 30))
        if number % 8 == 7:
            give_up(server, given)
        else:
            assert len(server.complete(given, wanted, logprobs=False).tokens) == wanted

    options = {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": BLOCKS}
    with serve(checkpoint, tmp_path, ONLY_LEAKS_GROW, **options) as server:
        before, sizes = server.complete(prompt(280, 1), 8, logprobs=False).tokens, []
        for first in range(0, REQUESTS, REQUESTS // 6):
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda number: ask(server, number), range(first, first + REQUESTS // 6)))
            sizes.append(resident_mib(server))
            print(f"after {first + REQUESTS // 6} requests, resident MiB by process: {sizes[-1]}", flush=True)
        assert server.metric("vllm:num_preemptions_total") > 0
        assert server.complete(prompt(280, 1), 8, logprobs=False).tokens == before
        assert server.metric("vllm:num_requests_running") == server.metric("vllm:num_requests_waiting") == 0
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        print(f"{server.metric('vllm:num_preemptions_total'):.0f} preemptions")
        assert sum(sizes[-1]) - sum(sizes[1]) < GROWTH_MIB
