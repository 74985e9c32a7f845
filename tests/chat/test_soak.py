# SPDX-License-Identifier: Apache-2.0
"""Many short requests of mixed lengths, some of which the client gives up: nothing lost, nothing left, memory flat."""

import asyncio
import random
import re
import time
from pathlib import Path

import aiohttp
import pytest

from .driver import ScriptedServer

pytestmark = pytest.mark.vllm
AT_ONCE = 32
# What the server's memory may grow by, in KiB, while it answers the second half of the long run.
GROWTH_KIB = 48 * 1024


def resident_kib(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


async def ask(session: aiohttp.ClientSession, url: str, number: int, source: random.Random) -> str:
    """One request; how it ended: "answered" or "given up". Raises AssertionError if the answer is another's."""
    said = f"{number} " + "word " * source.choice((0, 1, 3, 20, 150))
    gives_up, streams = source.random() < 0.15, source.random() < 0.5
    script = {"script": f"thought {number}</think>{said}", "chunk": source.choice((1, 4, 64))}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Q " * source.choice((1, 10, 300))}],
        "stream": streams or gives_up,
        "vllm_xargs": script | ({"hang": 1, "eos": 0} if gives_up else {}),
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
        if gives_up:
            await answer.content.readline()
            answer.close()
            return "given up"
        if not streams:
            message = (await answer.json())["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == (f"thought {number}", said)
            return "answered"
        text = (await answer.read()).decode()
    pieces = re.findall(r'"content":"((?:[^"\\]|\\.)*)"', text)
    assert "".join(pieces) == said and text.endswith("data: [DONE]\n\n")
    return "answered"


async def ask_all(url: str, numbers, source: random.Random) -> list[str]:
    slots = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300), connector=aiohttp.TCPConnector(limit=AT_ONCE)
    ) as session:

        async def one(number):
            async with slots:
                return await ask(session, url, number, source)

        return await asyncio.gather(*map(one, numbers))


def soak(server: ScriptedServer, numbers, seed: int) -> None:
    ends = asyncio.run(ask_all(server.base_url, numbers, random.Random(seed)))
    assert len(ends) == len(numbers) and {"answered", "given up"} == set(ends)
    deadline = time.monotonic() + 60
    while server.live() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.live() == []


def test_a_thousand_requests(servers):
    soak(servers["v41"], range(1000), seed=8)


@pytest.mark.long
def test_ten_thousand_requests(servers):
    server = servers["v41"]
    soak(server, range(5000), seed=81)
    before = resident_kib(server._child.pid)
    soak(server, range(5000, 10_000), seed=82)
    grown = resident_kib(server._child.pid) - before
    print(f"resident memory: {before} KiB, then {grown:+d} KiB")
    assert grown < GROWTH_KIB
