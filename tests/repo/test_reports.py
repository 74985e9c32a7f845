# SPDX-License-Identifier: Apache-2.0
"""docs/en/reports.md has every public report once, and names tests that exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.repo.checkout import ROOT, tree

TEXT = (ROOT / "docs" / "en" / "reports.md").read_text()
# Those of the collection, which has gaps.
NUMBERS = set(range(1, 118)) - {5, 14, 22, 27, 33, 35, 39, 44, 45, 49, 71, 79, 90, 92, 96, 108, 115}
ISSUES = re.compile(r"(kernel|topologies|relay|chat|two-cards|eight-cards) issue\b|speed issues\b")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| \d", line)]
NAMED = sorted({tuple(name.split("::")) for name in re.findall(r"`([\w/]+\.py::\w+)`", TEXT)})


def status(row: list[str]) -> str:
    return row[2].partition(":")[0]


def defined_in(path: str) -> set[str]:
    """Names of the test functions of a file below tests/; none if there is no such file."""
    file = Path("tests") / path
    if not (ROOT / file).is_file():
        return set()
    return {node.name for node in tree(file).body if getattr(node, "name", "").startswith("test_")}


def test_every_report_is_there_once():
    assert Counter(int(row[0].split()[0]) for row in ROWS) == Counter(NUMBERS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split()[0])
def test_row(row):
    """Three filled columns: the thread, what must not happen, and who holds it in the words of the page's head."""
    assert len(row) == 3 and all(len(cell) > 10 for cell in row)
    tests, issues = re.findall(r"\w+\.py::\w+", row[2]), ISSUES.findall(row[2])
    names_tests, names_issues = {
        "held": (True, False), "held in part": (True, True), "later": (False, True), "cannot": (False, False),
    }[status(row)]  # fmt: skip
    assert (bool(tests), bool(issues)) == (names_tests, names_issues)
    assert len(tests) == row[2].count(".py"), "a test is named without its file, or not in the page's form"


@pytest.mark.parametrize("path, name", NAMED, ids=map("::".join, NAMED))
def test_named_test_exists(path, name):
    assert name in defined_in(path)


def test_absent_tests_are_noticed():
    assert not defined_in("kernels/test_nothing.py")
    assert "test_nothing" not in defined_in("kernels/test_e4m3.py")
    assert "test_any_float" in defined_in("kernels/test_e4m3.py")


def test_counts_at_the_top():
    seen = Counter(map(status, ROWS))
    by_reference = sum(status(row) == "held" and "(reference)" in row[2] for row in ROWS)
    stated = [int(number) for number in re.findall(r"\d+", re.search(r"^\*\*Counts: .*", TEXT, re.M)[0])]
    assert stated == [seen["held"], seen["held in part"], seen["later"], seen["cannot"], len(ROWS), by_reference]
