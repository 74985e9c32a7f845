# SPDX-License-Identifier: Apache-2.0
"""The summary holds the newest figure of each id, and says where it is from; charts are drawn from it."""

import importlib.util
import json
import subprocess
import sys

import pytest

from benchmarks.charts import CHARTS, rows_of
from benchmarks.summary import summarise
from tests.repo.checkout import ROOT


def _receipt(path, date, figures, schema=1):
    content = {
        "schema": schema, "date": date, "scope": f"scope of {path.stem}", "machine": {"gpu": "a card"},
        "figures": [{"id": name, "value": value, "unit": "x", "p10": 0} for name, value in figures.items()],
    }  # fmt: skip
    path.write_text(json.dumps(content))


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    _receipt(folder / "a.json", "2026-03-02T00:00:00+00:00", {"op/one/vs-torch": 2.0, "op/two/floor-fraction": 0.5})
    _receipt(folder / "b.json", "2026-03-01T00:00:00+00:00", {"op/one/vs-torch": 9.0, "op/one/time": 7.0})
    (folder / "other.json").write_text("{}")
    return folder


def test_newest_of_each_id_by_date_and_not_by_name(results):
    figures = summarise(results, results.parent)["figures"]
    assert [(f["id"], f["value"], f["receipt"]) for f in figures] == [
        ("op/one/time", 7.0, "results/b.json"),
        ("op/one/vs-torch", 2.0, "results/a.json"),
        ("op/two/floor-fraction", 0.5, "results/a.json"),
    ]
    assert {(f["machine"], f["unit"]) for f in figures} == {("a card", "x")}
    assert figures[1]["scope"] == "scope of a"


def test_another_schema_is_refused_by_name(results):
    _receipt(results / "c.json", "2026-03-03T00:00:00+00:00", {}, schema=2)
    with pytest.raises(ValueError, match="c.json has schema 2"):
        summarise(results, results.parent)


def test_script_writes_the_summary_and_reads_it_not_as_a_receipt(results):
    for _ in range(2):
        subprocess.run([sys.executable, ROOT / "benchmarks" / "summary.py", results], check=True, timeout=60)
    written = json.loads((results / "summary.json").read_text())
    assert written["schema"] == 1 and len(written["figures"]) == 3


def test_each_chart_shows_its_kind_of_figure(results):
    figures = summarise(results, results.parent)["figures"]
    assert rows_of(figures, CHARTS["ratios"][1]) == [("op/one/vs-torch", 2.0)]
    assert rows_of(figures, CHARTS["fractions"][1]) == [("op/two/floor-fraction", 0.5)]


def _charts(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "charts.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_charts_without_a_summary_say_what_writes_it(tmp_path):
    done = _charts(tmp_path / "summary.json", tmp_path)
    assert done.returncode == 2 and "hint: python benchmarks/summary.py" in done.stderr


def test_charts_are_drawn_or_say_what_is_missing(results, tmp_path):
    (results / "summary.json").write_text(json.dumps(summarise(results, results.parent)))
    done = _charts(results / "summary.json", tmp_path / "charts")
    if importlib.util.find_spec("matplotlib") is None:
        assert done.returncode == 2 and "hint: pip install matplotlib" in done.stderr
    else:
        names = {path.name for path in (tmp_path / "charts").iterdir()}
        assert done.returncode == 0 and names == {f"{chart}.{kind}" for chart in CHARTS for kind in ("png", "svg")}
