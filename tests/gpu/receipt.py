# SPDX-License-Identifier: Apache-2.0
"""Script: run `tests/gpu` on an Ampere card and write a receipt of it, a JSON file to send with a report.

    python tests/gpu/receipt.py RECEIPT [arguments of pytest]

Exit status 0 if nothing failed, 1 if something did, 2 if this machine has no Ampere card.
"""

import datetime
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCOPE = "tests of kernels and of a tiny random model; no speed and no released weights"


class Collector:
    """What became of each test: its worst phase counts.

    Attributes:
        outcomes: test id -> "passed", "failed" or "skipped".
        failures: test id -> the last line of its error.
        skips: reason -> how many.
    """

    def __init__(self):
        self.outcomes: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._fail(report.nodeid, report)
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped"
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1
        else:
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_collectreport(self, report):
        if report.failed:
            self._fail(report.nodeid, report)

    def _fail(self, name, report):
        self.outcomes[name] = "failed"
        self.failures[name] = str(report.longrepr).strip().splitlines()[-1]


def card() -> str:
    """Name and compute capability of the first card; "" without one."""
    import torch

    if not torch.cuda.is_available():
        return ""
    major, minor = torch.cuda.get_device_capability(0)
    return f"{torch.cuda.get_device_name(0)}, compute capability {major}.{minor}"


def _output(*command) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout.strip()


def receipt(collector: Collector, command: list[str], seconds: float, started: str) -> dict:
    """The receipt's content; "environment" is what `vllm-ampere env` prints, drivers and versions included."""
    return {
        "schema": 1,
        "kind": "test-ampere",
        "scope": SCOPE,
        "card": card(),
        "environment": json.loads(_output(sys.executable, ROOT / "vllm_ampere.py", "env", "--format", "json") or "{}"),
        "commit": _output("git", "rev-parse", "HEAD") or "not a git checkout",
        "changed files": _output("git", "status", "--porcelain").splitlines(),
        "command": command,
        "started": started,
        "seconds": round(seconds, 1),
        "counts": dict(Counter(collector.outcomes.values())),
        "failures": collector.failures,
        "skips": dict(collector.skips),
    }


def main(arguments: list[str]) -> int:
    if not arguments:
        print("error: no name for the receipt\nhint: python tests/gpu/receipt.py receipt.json", file=sys.stderr)
        return 2
    if "compute capability 8." not in (seen := card()):
        print(f"error: an Ampere card is needed, found: {seen or 'no card'}\nhint: `make test-gpu` runs the same tests "
              "on a newer card", file=sys.stderr)
        return 2
    target, command = Path(arguments[0]).absolute(), ["-m", "gpu", "--rootdir", str(ROOT), str(ROOT / "tests"), *arguments[1:]]
    collector, start = Collector(), time.monotonic()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    status = pytest.main(command, plugins=[collector])
    content = receipt(collector, command, time.monotonic() - start, started)
    target.write_text(json.dumps(content, indent=2) + "\n")
    print(f"receipt: {target}: {content['counts']}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
