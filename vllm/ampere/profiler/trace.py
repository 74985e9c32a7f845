# SPDX-License-Identifier: Apache-2.0
"""Traces of torch's profiler: find them, read them, sum them up."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from ..errors import AmpereError
from . import stages

_SUFFIXES = (".json", ".json.gz")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU_WORK = "cpu_op"
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_FRAMES = ("python_function", "user_annotation")
_STEP = "execute_"
_LISTED = 10
_MADE_BY = "name a trace of torch's profiler, as vLLM writes it, or a folder of them"


@dataclass(frozen=True)
class Summary:
    """One process's trace.

    Attributes:
        trace: file name.
        device: name of the card, or "cpu".
        steps: engine steps that the trace holds, 0 if it marks none.
        window_ms: from the start of the first kernel to the end of the last.
        overlap_ms: what kernels of several streams ran beside each other: their sum less the time any ran.
        rows: {"stage", "calls", "total_ms", "average_us", "share", "per_step_ms"} of each stage and of the host gap, in
            which no kernel ran; `share` is of the window, and adds up to 1 plus the overlap. `per_step_ms` is None
            without steps.
        others: {"name", "calls", "total_ms"} of the kernels that no stage claims, longest first, at most ten.
    """

    trace: str
    device: str
    steps: int
    window_ms: float
    overlap_ms: float
    rows: list[dict]
    others: list[dict]


def find_traces(path: Path) -> list[Path]:
    """The trace, or the newest of each process in a folder.

    Raises:
        AmpereError: there is none.
    """
    if not path.exists():
        raise AmpereError(f"there is no {path}", _MADE_BY)
    if path.is_file():
        return [path]
    newest = {}
    for found in sorted(path.iterdir(), key=lambda each: each.stat().st_mtime_ns):
        if found.name.endswith(_SUFFIXES):
            newest[re.sub(r"\.\d+\.pt\.trace\.", ".", found.name)] = found
    if not newest:
        raise AmpereError(f"{path} holds no trace", _MADE_BY)
    return sorted(newest.values())


def read(paths: list[Path]) -> list[Summary]:
    """What each trace shows; a process that ran no kernel is left out where another did.

    Raises:
        AmpereError: a file is no trace, or none of them holds a step's work.
    """
    found = [_summarise(path, _load(path)) for path in paths]
    on_cards = [summary for summary in found if summary and summary.device != "cpu"]
    shown = on_cards or [summary for summary in found if summary]
    if not shown:
        raise AmpereError("nothing ran while the trace was taken", "profile while requests are answered")
    return shown


def _load(path: Path) -> dict:
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        document = json.loads(content)
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise AmpereError(f"{path} is not a trace: {type(error).__name__}", _MADE_BY) from error
    except OSError as error:
        raise AmpereError(f"cannot read {path}: {error.strerror or error}", _MADE_BY) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise AmpereError(f"{path} is not a trace: it has no traceEvents", _MADE_BY)
    return document


def _summarise(path: Path, document: dict) -> Summary | None:
    events = [event for event in document["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    work, frames = [event for event in events if event.get("cat") in _DEVICE_WORK], dict(_surroundings(events))
    device = "cpu"
    if work:
        # A kernel's frames are those around the call that launched it.
        launched = {_correlation(e): frames.get(id(e), ()) for e in events if e.get("cat") in _LAUNCHES}
        around = [launched.get(_correlation(event), ()) for event in work]
        cards = document.get("deviceProperties") or [{}]
        device = cards[0].get("name", "card")
    else:
        work = [event for event in events if event.get("cat") == _CPU_WORK and id(event) in frames]
        around = [frames[id(event)] for event in work]
    if not work:
        return None
    calls, total_us = defaultdict(int), defaultdict(float)
    others: dict[str, list] = defaultdict(lambda: [0, 0.0])
    for event, near in zip(work, around):
        stage = stages.of(event["name"], near)
        calls[stage] += 1
        total_us[stage] += event["dur"]
        if stage == stages.OTHER:
            others[event["name"]][0] += 1
            others[event["name"]][1] += event["dur"]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in work)
    window_us, busy_us = max(end for _, end in spans) - spans[0][0], _union(spans)
    steps = sum(e["name"].startswith(_STEP) for e in events if e.get("cat") == "user_annotation")

    def row(stage: str, count: int | None, us: float) -> dict:
        return {
            "stage": stage, "calls": count, "total_ms": us / 1e3, "average_us": us / count if count else None,
            "share": us / window_us if window_us else 0.0, "per_step_ms": us / 1e3 / steps if steps else None,
        }  # fmt: skip

    rows = [row(stage, calls[stage], total_us[stage]) for stage in stages.STAGES if calls[stage]]
    rows.append(row("host gap", None, window_us - busy_us))
    longest = sorted(others.items(), key=lambda entry: -entry[1][1])[:_LISTED]
    listed = [{"name": name, "calls": count, "total_ms": us / 1e3} for name, (count, us) in longest]
    overlap_ms = max(0.0, sum(total_us.values()) - busy_us) / 1e3
    return Summary(path.name, device, steps, window_us / 1e3, overlap_ms, rows, listed)


def _correlation(event: dict) -> int | None:
    return event.get("args", {}).get("correlation")


def _union(spans: list[tuple[float, float]]) -> float:
    """Length covered by intervals that are sorted by their start."""
    covered, reached = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _surroundings(events: list[dict]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """id of each launch and of each outermost CPU operator -> names of the Python frames around it, outermost first."""
    threads = defaultdict(list)
    for event in events:
        if event.get("cat") in (*_FRAMES, *_LAUNCHES, _CPU_WORK):
            threads[event["pid"], event["tid"]].append(event)
    for thread in threads.values():
        open_events: list[dict] = []
        for event in sorted(thread, key=lambda each: (each["ts"], -each["dur"])):
            while open_events and open_events[-1]["ts"] + open_events[-1]["dur"] <= event["ts"]:
                open_events.pop()
            inside = any(each["cat"] == _CPU_WORK for each in open_events)
            if event["cat"] in _LAUNCHES or (event["cat"] == _CPU_WORK and not inside):
                yield id(event), tuple(each["name"] for each in open_events if each["cat"] in _FRAMES)
            if event["cat"] not in _LAUNCHES:
                open_events.append(event)
