# SPDX-License-Identifier: Apache-2.0
"""Which tests can run in this environment, and why the others did not."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.tables import TABLES, add

ROOT = Path(__file__).resolve().parents[1]
ENGINES = "tests/e2e/"
# Tests of a marker run in one environment of `make env` only. Inside it nothing is skipped for want of a package.
HOMES = {"vllm": ".venv", "oracle": ".venv-oracle"}


def _obstacle(marker: str) -> str:
    """Why tests of this marker cannot run here; "" if they can."""
    if marker in HOMES:
        home = HOMES[marker]
        return "" if Path(sys.prefix) == ROOT / home else f"runs in {home}"
    import torch

    needed = {"gpu": 1, "multi_gpu": 2}[marker]
    found = torch.cuda.device_count()
    return "" if found >= needed else f"needs {needed} GPU{'s' * (needed > 1)}, {found} found"


def pytest_collection_modifyitems(items):
    markers = {m for m in (*HOMES, "gpu", "multi_gpu") if any(item.get_closest_marker(m) for item in items)}
    obstacles = {marker: _obstacle(marker) for marker in markers}
    for item in items:
        for marker, reason in obstacles.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))  # what takes longest is begun first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        """A file is run by one process, and the files of engines by one together: an engine's processes fill two cores."""

        def _split_scope(self, nodeid):
            return ENGINES if nodeid.startswith(ENGINES) else nodeid.partition("::")[0]

    return ByFile(config, log)


def pytest_configure(config):
    config.stash[TABLES] = {}


def pytest_sessionfinish(session):
    """A process of pytest-xdist hands its tables to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tables"] = session.config.stash[TABLES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    add(node.config.stash[TABLES], getattr(node, "workeroutput", {}).get("tables", {}))


def pytest_terminal_summary(terminalreporter, config):
    for title, figures in config.stash[TABLES].items():
        terminalreporter.section(title)
        for label, figure in figures.items():
            terminalreporter.write_line(f"{figure:10.4f}  {label}")
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        terminalreporter.section("skips by reason")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5d}  {reason}")
