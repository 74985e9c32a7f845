# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere profile --model` with the patched CPU engine: its stages add up to the time that operators ran."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import OPTIONS, arguments, environment

pytestmark = pytest.mark.vllm
STEPS = 2


def profile(*words):
    command = [Path(sys.executable).parent / "vllm-ampere", "profile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment())


def covered_ms(trace):
    """Time in which an operator runs, over all threads, by counting how many are open. Stamps are microseconds since the
    machine started, so that sums of thousands differ in their last digits."""
    edges = {}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") == "cpu_op":
            thread = edges.setdefault(event["tid"], [])
            thread += [(event["ts"], 1), (event["ts"] + event["dur"], -1)]
    covered_us = 0.0
    for thread in edges.values():
        opened, before = 0, 0.0
        for when, step in sorted(thread):
            covered_us += (when - before) * (opened > 0)
            opened, before = opened + step, when
    return covered_us / 1e3


def test_a_prefill_and_decode_steps_of_the_tiny_model(tmp_path):
    model = tiny_checkpoint.write(tmp_path / "model", "sharp")
    traces, output = tmp_path / "traces", tmp_path / "out.json"
    ran = profile(
        "--model", model, "--steps", str(STEPS), "--context", "40", "--traces", traces, "--output", output,
        "--", *arguments(OPTIONS),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = {summary["trace"].partition("_")[0]: summary for summary in json.loads(output.read_text())["traces"]}
    assert {name: summary["steps"] for name, summary in found.items()} == {"prefill": 1, "decode": STEPS}
    for name, summary in found.items():
        total_ms = {row["stage"]: row["total_ms"] for row in summary["rows"]}
        expected = {"attention", "indexer", "mHC", "routed experts", "shared expert", "dense", "engram", "sampler"}
        assert expected < total_ms.keys()
        worked_ms = sum(ms for stage, ms in total_ms.items() if stage != "host gap")
        assert worked_ms == pytest.approx(covered_ms(traces / summary["trace"]), rel=1e-5)
        assert total_ms["other"] < 0.1 * worked_ms


@pytest.mark.parametrize("words, message", [
    ([], r"error: the engine ended with 1: \S*Error: \S.*"),
    (["--", "--no-such-argument"], r"error: the engine ended with 2: .*unrecognized arguments: --no-such-argument"),
])  # fmt: skip
def test_an_engine_that_does_not_start(tmp_path, words, message):
    (tmp_path / "config.json").write_text("{}")
    ran = profile("--model", tmp_path, *words)
    started, error, hint = ran.stderr.splitlines()
    assert (ran.returncode, ran.stdout) == (1, "") and started.startswith("starting")
    assert re.fullmatch(message, error) and hint.startswith("hint: ")
