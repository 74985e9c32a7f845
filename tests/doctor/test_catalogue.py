# SPDX-License-Identifier: Apache-2.0
"""codes.toml: numbered by area, with sources that exist, pins that hold, and the documents in step with it."""

import re

import pytest

from tests.repo.checkout import ROOT
from tests.repo.test_reports import NUMBERS
from vllm.ampere import upstream
from vllm.ampere.doctor import catalogue, checkpoint, gpu, host, overlay, peer, run, software, topology
from vllm.ampere.doctor.catalogue import AREAS, codes, explain
from vllm.ampere.errors import UsageError

DOCUMENT = (ROOT / "docs/en/troubleshooting.md").read_text()
MODULES = {"host": [host], "gpu": [gpu], "software": [software], "overlay": [overlay], "checkpoint": [checkpoint],
           "topology": [topology, peer]}  # fmt: skip


def test_codes_are_numbered_by_area_and_in_order():
    assert all(re.fullmatch(r"AMP[1-7]\d\d", code) for code in codes())
    assert list(codes()) == sorted(codes()) and len(run.CHECKS) >= 25
    for area, modules in MODULES.items():
        here = {code for module in modules for code in module.CHECKS}
        assert here == {code for code, entry in codes().items() if entry.area == area}
    assert set(AREAS.values()) == {*MODULES, "logs"}


@pytest.mark.parametrize("entry", codes().values(), ids=codes())
def test_entry(entry):
    """Every field is said, in one line, and the source is a report that is listed or a public write-up."""
    for text in (entry.title, entry.why, entry.fix, entry.source):
        assert len(text) > 2 and text.isprintable() and text == text.strip()
    assert entry.why.endswith(".") and not entry.fix.endswith(".") and "|" not in entry.fix + entry.why
    cited = [int(number) for number in re.findall(r"\b\d+\b", entry.source.replace("SM80", ""))]
    assert set(cited) <= NUMBERS and (cited or "write-up" in entry.source)
    assert bool(entry.patterns) == (entry.area == "logs" and entry.code != "AMP700")
    assert bool(entry.after) == bool(entry.until)


def test_versions_in_fixes_are_the_pins():
    pins = upstream.pins()
    text = " ".join(f"{entry.why} {entry.fix}" for entry in codes().values())
    assert set(re.findall(r"\bvllm==([\d.]+\d)", text)) == {pins["vllm"]["version"]}
    assert set(re.findall(r"\btorch==([\d.]+\d)", text)) == {pins["production"]["torch"]}
    assert set(re.findall(r"CUDA (\d+\.\d+)", text)) == {pins["production"]["cuda"]}
    assert set(re.findall(r"vLLM (\d[\d.]+\d)", text)) == {pins["vllm"]["version"]}


@pytest.mark.parametrize("typed, code", [("AMP306", "AMP306"), ("amp306", "AMP306")])
def test_explain(typed, code):
    assert explain(typed).code == code


@pytest.mark.parametrize("typed, near", [("AMP36", "AMP306"), ("AMP3006", "AMP306"), ("APM101", "AMP101")])
def test_an_unknown_code_gets_the_nearest(typed, near):
    with pytest.raises(UsageError, match=f"there is no code '{typed}'") as raised:
        explain(typed)
    assert f"did you mean {near}?" in raised.value.hint


def test_words_that_are_near_no_code():
    with pytest.raises(UsageError) as raised:
        explain("zzz")
    assert "did you mean" not in raised.value.hint


def rows() -> list[str]:
    """The table of the document, as codes.toml gives it."""
    cells = ([entry.code, entry.title, entry.why, entry.fix, entry.source] for entry in codes().values())
    return [f"| {' | '.join(row)} |" for row in cells]


def test_the_document_has_every_code_in_step():
    written = re.findall(r"^\| AMP.*$", DOCUMENT, re.M)
    assert written == rows(), "replace the table's rows by what codes.toml gives (`rows` of this test)"


def test_codes_named_in_texts_exist():
    texts = [DOCUMENT, *(f"{entry.why} {entry.fix}" for entry in codes().values())]
    named = {code for text in texts for code in re.findall(r"\bAMP\d{3}\b", text)}
    assert named <= set(catalogue.codes())
