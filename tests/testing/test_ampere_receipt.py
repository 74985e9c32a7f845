# SPDX-License-Identifier: Apache-2.0
"""What `make test-ampere` writes, from a run of made-up tests."""

import itertools
import json

import pytest

from tests.gpu import ampere_receipt

TESTS = """
import pytest
pytestmark = pytest.mark.gpu
def test_right(): pass
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="not on this card")
def test_left_out(): pass
@pytest.fixture
def broken(): raise OSError("no memory")
def test_without_its_fixture(broken): pass
"""

NUMBER = itertools.count()  # a module is imported once a process


@pytest.fixture
def run(tmp_path, monkeypatch):
    """main() on a folder of tests, as on a card of some name; its status and the receipt, or None."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu']\n")
    monkeypatch.setattr(ampere_receipt, "ROOT", tmp_path)
    monkeypatch.setattr(ampere_receipt, "environment", lambda: {"gpus": "driver 1"})
    monkeypatch.setattr(ampere_receipt.receipt, "machine", lambda: {"gpu": "A100"})

    def call(tests, name, *arguments):
        (tmp_path / "tests" / f"test_made_up_{next(NUMBER)}.py").write_text(tests)
        monkeypatch.setattr(ampere_receipt, "card", lambda: name)
        target = tmp_path / "receipt.json"
        status = ampere_receipt.main([str(target), "-p", "no:cacheprovider", "--import-mode=importlib", *arguments])
        return status, json.loads(target.read_text()) if target.exists() else None

    return call


def test_receipt_counts_and_names_what_failed(run):
    status, receipt = run(TESTS, "A100, compute capability 8.0")
    assert status == 1 and receipt["schema"] == 1 and receipt["kind"] == "test-ampere"
    assert receipt["counts"] == {"passed": 1, "failed": 2, "skipped": 1}
    assert {name.split("::")[1] for name in receipt["failures"]} == {"test_wrong", "test_without_its_fixture"}
    assert receipt["skips"] == {"not on this card": 1}
    assert receipt["machine"] == {"gpu": "A100"} and receipt["environment"] == {"gpus": "driver 1"}
    assert len(receipt["commit"]) in (7, 40) and receipt["scope"]


def test_all_right_is_status_0(run):
    status, receipt = run(TESTS, "A6000, compute capability 8.6", "-k", "test_right")
    assert status == 0 and receipt["counts"] == {"passed": 1} and not receipt["failures"]


def test_a_file_that_cannot_be_imported_is_a_failure(run):
    status, receipt = run("import nothing_of_this_name", "A6000, compute capability 8.6")
    assert status == 1 and receipt["counts"] == {"failed": 1} and "test_made_up" in next(iter(receipt["failures"]))


@pytest.mark.parametrize("name", ["H200, compute capability 9.0", "no card"])
def test_another_card_is_refused_before_anything_runs(run, name, capsys):
    assert run(TESTS, name) == (2, None)
    assert f"finds {name}\nhint: " in capsys.readouterr().err


def test_a_receipt_needs_a_name(capsys):
    assert ampere_receipt.main([]) == 2 and "hint: " in capsys.readouterr().err
