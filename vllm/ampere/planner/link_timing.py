# SPDX-License-Identifier: Apache-2.0
"""Times what cards say to each other. `torch.distributed.run` starts it, one process a card; it is no module.

Over each group of cards: an all-reduce of each size, and a message from its first card to its last; and from host
memory to all cards of a node at once. The first process writes the figures.

On a card a call is captured into a CUDA graph many times over, as a decode step holds it, so that the time to launch it
from Python is left out.
"""

import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist

ROUNDS = 5
# A call is repeated until so many bytes have gone over the link, within these bounds.
ROUND_BYTES = 256 << 20
LEAST_REPEATS, MOST_REPEATS = 2, 50


def seconds_of_graph(call: Callable[[], object], repeats: int, around: Callable = nullcontext) -> float:
    """Seconds of one call among `repeats` in a CUDA graph, captured inside the context that `around` gives."""
    graph = torch.cuda.CUDAGraph()
    with around(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(repeats):
            call()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return statistics.median(times)


def seconds_of_loop(call: Callable[[], object], repeats: int, around: Callable = nullcontext) -> float:
    """Seconds of one call among `repeats` on the CPU, which captures nothing."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


class Cards:
    """This process's card among all of them.

    Args:
        device: "cuda" or "cpu".
        per_node: cards of a node.

    Attributes:
        rank: its number over all nodes.
    """

    def __init__(self, device: str, per_node: int):
        self.on_gpu = device == "cuda"
        dist.init_process_group("nccl" if self.on_gpu else "gloo")
        self.rank = dist.get_rank()
        self.device = torch.device(f"cuda:{self.rank % per_node}" if self.on_gpu else "cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)

    def microseconds(
        self, call: Callable[[], object], nbytes: int, group: dist.ProcessGroup | None, around: Callable = nullcontext
    ) -> float:
        """Time of a call that every member of a group makes; the slowest one's. `around` as in `seconds_of_graph`."""
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS, ROUND_BYTES // nbytes))
        for _ in range(LEAST_REPEATS):
            call()
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group)
        seconds = (seconds_of_graph if self.on_gpu else seconds_of_loop)(call, repeats, around)
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
        return slowest.item() * 1e6

    def all_reduce(self, nbytes: int, group: dist.ProcessGroup) -> float:
        """Microseconds to sum `nbytes` over a group."""
        values = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self.device)
        return self.microseconds(lambda: dist.all_reduce(values, group=group), nbytes, group)

    def message(self, nbytes: int, ends: tuple[int, int], group: dist.ProcessGroup) -> float:
        """Microseconds of a message between two cards: half of a round trip. Both call it."""
        values = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=self.device)
        other = ends[self.rank == ends[0]]
        steps = (dist.send, dist.recv) if self.rank == ends[0] else (dist.recv, dist.send)
        return self.microseconds(lambda: [step(values, other, group) for step in steps], nbytes, group) / 2

    def from_host(self, nbytes: int) -> float:
        """Microseconds to copy pinned host memory to the card, while every other card does the same."""
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.on_gpu)
        values = torch.empty_like(host, device=self.device)
        return self.microseconds(lambda: values.copy_(host, non_blocking=True), nbytes, None)


def main() -> None:
    """Time what the JSON file of the first argument asks for; the second names the file for the figures."""
    asked = json.loads(Path(sys.argv[1]).read_text())
    cards = Cards(asked["device"], asked["cards"])
    samples = []

    def note(what: str, link: str, count: int, nbytes: int, microseconds: float) -> None:
        samples.append({"what": what, "link": link, "cards": count, "nbytes": nbytes, "us": microseconds})

    for link, members in asked["groups"].items():
        ends = (members[0], members[-1])
        # Every process takes part in making a group, whether it is a member or not.
        group, pair = dist.new_group(members), dist.new_group(list(ends))
        for nbytes in asked["sizes"]:
            if cards.rank in members:
                note("all-reduce", link, len(members), nbytes, cards.all_reduce(nbytes, group))
            if cards.rank in ends:
                note("message", link, 2, nbytes, cards.message(nbytes, ends, pair))
        dist.barrier()
    nbytes = asked["sizes"][-1]
    note("from host", "host", asked["cards"], nbytes, cards.from_host(nbytes))
    if cards.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(samples))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
