# SPDX-License-Identifier: Apache-2.0
"""Script: run the tests that need a card on an Ampere one, and write a receipt to send with a report.

    python tests/gpu/ampere_receipt.py RECEIPT [arguments of pytest]

Exit status 0 if nothing failed, 1 if something did, 2 if there is no Ampere card or no name for the receipt.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import receipt

SCOPE = "tests of the kernels and of a tiny random model on the card named; no speed, no released weights"


class Outcomes:
    """A pytest plugin that keeps what became of each test.

    Attributes:
        of: test -> "passed", "failed" or "skipped", the worst of its phases.
        failures: test -> the last line of its error.
        skips: reason -> how many tests.
    """

    def __init__(self):
        self.of: dict[str, str] = {}
        self.failures: dict[str, str] = {}
        self.skips: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self.of[report.nodeid] = "skipped"
            self.skips[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.passed:
            self.of.setdefault(report.nodeid, "passed")
        self._keep_failure(report)

    def pytest_collectreport(self, report):
        self._keep_failure(report)

    def _keep_failure(self, report):
        if report.failed:
            self.of[report.nodeid] = "failed"
            self.failures[report.nodeid] = str(report.longrepr).strip().splitlines()[-1]

    def summary(self) -> dict:
        return {"counts": dict(Counter(self.of.values())), "failures": self.failures, "skips": dict(self.skips)}


def card() -> str:
    """Name and compute capability of the first card; "no card" without one."""
    if not torch.cuda.is_available():
        return "no card"
    return "{}, compute capability {}.{}".format(torch.cuda.get_device_name(0), *torch.cuda.get_device_capability(0))


def environment() -> dict:
    """What `vllm-ampere env` knows of this machine: driver, versions, and whether the patches are on."""
    command = [sys.executable, ROOT / "vllm_ampere.py", "env", "--format", "json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print("error: the receipt has no name\nhint: python tests/gpu/ampere_receipt.py receipt.json", file=sys.stderr)
        return 2
    if " 8." not in card():
        print(f"error: this needs an Ampere card, and finds {card()}\nhint: run it on an A100, A6000 or RTX 3090",
              file=sys.stderr)
        return 2
    outcomes, target = Outcomes(), Path(arguments[0]).absolute()
    status = pytest.main(["-m", "gpu", f"--rootdir={ROOT}", str(ROOT / "tests"), *arguments[1:]], plugins=[outcomes])
    content = receipt.header("test-ampere", SCOPE) | {"environment": environment()} | outcomes.summary()
    target.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{target}: {content['counts']}")
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
