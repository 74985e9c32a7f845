# SPDX-License-Identifier: Apache-2.0
"""Kernel times: replays of CUDA graphs over rotated inputs (or calls by the host), contestants in alternation.

Times mean something between contestants of one race only. What decides a figure (how many inputs, whose turn it is,
the spread) is free of CUDA; `GraphReplay`, `EagerCalls` and `launches` are what needs a card.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

SAMPLES = 40
MIN_SAMPLES = 30


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of the samples, microseconds a call."""

    median_us: float
    p10_us: float
    p90_us: float


def spread(samples_us: Sequence[float]) -> Spread:
    """The spread of one contestant's samples.

    Raises:
        ValueError: fewer than 30 samples.
    """
    if len(samples_us) < MIN_SAMPLES:
        raise ValueError(f"{len(samples_us)} samples, a figure needs {MIN_SAMPLES}")
    tenths = statistics.quantiles(samples_us, n=10, method="inclusive")
    return Spread(statistics.median(samples_us), tenths[0], tenths[-1])


def rotation_count(bytes_per_call: int, l2_bytes: int) -> int:
    """Input sets whose calls together move more than twice the L2 cache, at least two.

    A set that comes round again has then been pushed out by the others.

    Args:
        bytes_per_call: what one call must move, at least 1.
        l2_bytes: size of the L2 cache.
    """
    return max(2, 2 * l2_bytes // bytes_per_call + 1)


def race(replays: Mapping[str, Callable[[], float]], samples: int = SAMPLES) -> dict[str, list[float]]:
    """Samples of every contestant, taken in alternation; who begins a round changes with the round.

    Args:
        replays: contestant to a function that replays it once and returns microseconds a call.
        samples: rounds.
    """
    names = list(replays)
    taken = {name: [] for name in names}
    for sample in range(samples):
        first = sample % len(names) if names else 0
        for name in names[first:] + names[:first]:
            taken[name].append(replays[name]())
    return taken


class GraphReplay:
    """A CUDA graph of one call on each input set; calling it replays the graph and returns microseconds a call.

    Args:
        calls: one function for each input set. Each runs once before the capture, so that what compiles, allocates
            or plans at first use has done so.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]):
        # The graph reads and writes what these hold.
        self._calls = list(calls)
        for call in calls:
            call()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for call in calls:
                call()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self()

    def __call__(self) -> float:
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / len(self._calls)


class EagerCalls:
    """The same calls one after the other, as a host issues them; calling it returns microseconds a call.

    Args:
        calls: as for `GraphReplay`.
    """

    def __init__(self, calls: Sequence[Callable[[], object]]):
        self._calls = list(calls)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self()

    def __call__(self) -> float:
        torch.cuda.synchronize()
        self._start.record()
        for call in self._calls:
            call()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / len(self._calls)


def launches(call: Callable[[], object]) -> int | None:
    """Kernels, copies and fills that one call runs on the card, counted by torch's profiler; None if it sees none."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_card = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return len(on_card) or None
