# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere doctor`: exit status, both formats, mistyped words; in the test's process and with nothing installed."""

import json
import subprocess
import sys

import pytest

from vllm.ampere.cli import main as cli

pydantic = pytest.importorskip("pydantic", reason="presets and reports of other nodes need pydantic")

from tests.cli.conftest import CHECKOUT  # noqa: E402
from tests.doctor.log_lines import GOOD, SHOWING  # noqa: E402
from tests.doctor.machine import Machine, PlayedSystem  # noqa: E402
from vllm.ampere import upstream  # noqa: E402
from vllm.ampere.doctor import system as system_module  # noqa: E402
from vllm.ampere.doctor.catalogue import codes  # noqa: E402
from vllm.ampere.doctor.peer import Report  # noqa: E402
from vllm.ampere.doctor.run import CHECKS  # noqa: E402
from vllm.ampere.testing import tiny_checkpoint  # noqa: E402

REPORT = pydantic.TypeAdapter(Report)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Machine:
    """The command looks at this one."""
    made = Machine(tmp_path)
    monkeypatch.setattr(upstream, "series_dir", lambda: made.series)
    monkeypatch.setattr(system_module, "System", made.system)
    return made


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint.write(tmp_path / "model", "sharp", engram_vocab_size=100, engram_n_heads=2)


def run(capsys, *words: str):
    status = cli.main(["doctor", *map(str, words)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err and "fault of ours" not in err
    return status, out, err


def test_a_good_machine(capsys, machine):
    status, out, err = run(capsys)
    lines = out.splitlines()
    assert status == 0 and err == f"{len(lines)} ok\n"
    assert lines[0] == "ok    AMP101  shared memory: 503.0 GiB of 504.0 GiB are free in /dev/shm."


def test_warnings_leave_the_status_alone_and_failures_do_not(capsys, machine):
    machine.each_card(persistent=False)
    status, out, err = run(capsys)
    assert status == 0 and "1 warn" in err and "hint: vllm-ampere doctor --explain CODE" in err
    (line,) = [line for line in out.splitlines() if line.startswith("warn")]
    assert line.startswith("warn  AMP210  persistence mode: cards 0, 1,") and " Fix: nvidia-smi -pm 1, or" in line
    machine.each_card(partitioned=True)
    status, out, err = run(capsys)
    assert status == 1 and "1 FAIL, 1 warn" in err
    (line,) = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert line == (
        "FAIL  AMP206  whole cards: cards 0, 1, 2, 3, 4, 5, 6, 7: MIG is on. Fix: nvidia-smi -mig 0, for each card"
    )


def test_json(capsys, machine):
    status, out, _ = run(capsys, "--format", "json", "--preset", "a800-80g-x8-tp4-pp2")
    report = REPORT.validate_json(out, strict=False)
    assert status == 0 and {finding.code for finding in report.findings} < set(CHECKS)
    assert report.facts.cards == {"NVIDIA A800 80GB PCIe 79.1 GiB": 8} and report.facts.driver == "580.65.06"
    assert report.facts.packages["torch"] == "2.14.0+cu130" and len(report.facts.patches) == 64


def test_two_nodes(capsys, machine, tmp_path):
    _, out, _ = run(capsys, "--format", "json")
    other = tmp_path / "other.json"
    other.write_text(out)
    status, out, _ = run(capsys, "--peer", other)
    assert status == 0 and "ok    AMP613  cards on both nodes: the same cards." in out
    machine.driver = "570.1"
    machine.cards.pop()
    status, out, _ = run(capsys, "--peer", other)
    assert status == 1 and "7 here, 8 there" in out
    assert "warn  AMP612  driver on both nodes: driver 570.1 here, 580.65.06 there." in out


def test_what_cannot_be_read_at_all(capsys, machine, monkeypatch):
    """Neither the facts for other nodes nor the checks take the command down."""

    def broken(self):
        raise RuntimeError("no metadata")

    monkeypatch.setattr(PlayedSystem, "packages", property(broken))
    status, out, _ = run(capsys, "--format", "json")
    report = REPORT.validate_json(out)
    found = {finding.code: finding for finding in report.findings}
    assert status == 0 and report.facts.packages is None
    assert found["AMP302"].status == "?" and "RuntimeError: no metadata" in found["AMP302"].seen


def test_from_a_folder_that_was_removed(site, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && {sys.executable} -S {site.root / 'vllm_ampere.py'} doctor"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "fault of ours" not in done.stderr and "AMP101" in done.stdout


def test_logs(capsys, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(GOOD)
    assert run(capsys, "--log", log)[0] == 0
    log.write_text(GOOD + SHOWING["AMP722"][0])
    assert run(capsys, "--log", log)[0] == 0, "advice is a warning"
    log.write_text(GOOD + SHOWING["AMP712"][0])
    status, out, _ = run(capsys, "--log", log)
    assert status == 1 and out.startswith("FAIL  AMP712  nvcc and its headers differ: line 15: /opt/cu13/include/")
    status, out, _ = run(capsys, "--log", log, "--format", "json")
    assert status == 1 and REPORT.validate_json(out).findings[0].code == "AMP712"


def test_explain(capsys):
    status, out, err = run(capsys, "--explain", "AMP101")
    entry = codes()["AMP101"]
    assert (status, err) == (0, "")
    assert out == f"AMP101: {entry.title}\nwhy: {entry.why}\nfix: {entry.fix}\nsource: {entry.source}\n"
    _, out, _ = run(capsys, "--explain", "amp712", "--format", "json")
    assert json.loads(out)["patterns"] == list(codes()["AMP712"].patterns)


@pytest.mark.parametrize("words, message, hint", [
    (["--explain", "AMP1o1"], "there is no code 'AMP1o1'", "did you mean AMP101?"),
    (["--log", "nothing.log"], "cannot read nothing.log: No such file or directory", "the server's output"),
    (["--log", "."], ". is a folder, not a log", "the server's output"),
    (["--log"], "expected one argument", "--help"),
    (["--lgo", "x"], "there is no '--lgo'", "did you mean --log?"),
    (["--preset", "a100-80g-x8-tp9"], "there is no preset 'a100-80g-x8-tp9'", "did you mean a100-80g-x8-tp8"),
    (["--log", "x", "--explain", "AMP101"], "not allowed with argument", "--help"),
    (["--log", "x", "--model", "y"], "--log looks at no machine, --model does", "leave --model or --log out"),
    (["--explain", "AMP101", "--preset", "y"], "--explain looks at no machine", "leave --preset"),
    (["--peer", "nothing.json"], "cannot read nothing.json: No such file or directory", "on the other node"),
    (["--format", "yaml"], "there is no 'yaml'", "--help"),
    (["AMP101"], "there is no 'AMP101'", "--help"),
])
def test_mistyped(capsys, monkeypatch, tmp_path, words, message, hint):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *words)
    error, hinted = err.splitlines()
    assert (status, out) == (2, "")
    assert error.startswith("error: ") and message in error and hinted.startswith("hint: ") and hint in hinted


@pytest.mark.parametrize("content, words", [
    ("", "Invalid JSON"),
    ("[]", "Input should be an object"),
    ('{"schema": 1, "facts": null, "findings": []}', "the report of a log, not of a machine"),
    ('{"schema": 1, "facts": {}, "findings": []}', "packages: Field required"),
    ('{"schema": 1, "facts": null, "findings": [], "more": 1}', "more: Unexpected keyword argument"),
    ('{"schema": 2, "facts": null, "findings": []}', "has schema 2, must have 1"),
])
def test_a_report_that_is_none(capsys, tmp_path, content, words):
    file = tmp_path / "other.json"
    file.write_text(content)
    status, out, err = run(capsys, "--peer", file)
    assert (status, out, len(err.splitlines())) == (2, "", 2) and words in err


def test_nothing_but_the_standard_library(site):
    """No vLLM, no pydantic, no package at all: it looks at what it can and says what it cannot."""
    ran = site.run("doctor", "--model", "/nowhere")
    assert ran.status == 1 and "Traceback" not in ran.err + ran.out
    found = {line.split()[1]: line for line in ran.out.splitlines()}
    assert len(found) >= 40
    assert found["AMP301"].startswith("FAIL") and found["AMP501"].startswith("FAIL")
    assert found["AMP302"].startswith("?") and found["AMP402"].startswith("?")
    assert found["AMP401"].startswith("FAIL"), "the overlay alone is a hollow namespace"
    report = json.loads(site.run("doctor", "--format", "json").out)
    assert report["facts"]["packages"] == {} and report["facts"]["patches"] is None
    assert {finding["status"] for finding in report["findings"]} <= {"ok", "FAIL", "warn", "?"}


@pytest.mark.parametrize("words, message", [
    (["--preset", "a800-80g-x8-tp4-pp2"], "a preset needs the package pydantic"),
    (["--peer", "x.json"], "--peer needs the package pydantic"),
])
def test_what_needs_pydantic_says_so(site, words, message):
    ran = site.run("doctor", *words)
    assert (ran.status, ran.out) == (1, "") and message in ran.err and len(ran.err.splitlines()) == 2


@pytest.mark.parametrize("init", ["raise ImportError('libcudart.so.13')", "import os; os._exit(3)", "def ("])
def test_a_broken_vllm_is_looked_at_and_never_run(site, init):
    site.vllm(init)
    ran = site.run("doctor")
    found = {line.split()[1]: line for line in ran.out.splitlines()}
    assert ran.status == 1 and found["AMP404"].startswith("FAIL") and found["AMP401"].startswith("ok")
    assert site.run("patches", "apply").status == 0
    assert "ok    AMP404  patches are on: applied on" in site.run("doctor").out


def test_logs_and_codes_need_nothing(site, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(SHOWING["AMP707"][0])
    assert "FAIL  AMP707" in site.run("doctor", "--log", str(log)).out
    assert site.run("doctor", "--explain", "AMP707").out.startswith("AMP707: a worker was killed")


def test_neither_torch_nor_vllm_is_imported(checkpoint):
    """The console script with everything installed, a checkpoint and its tokenizer."""
    code = (
        "import sys, vllm_ampere\n"
        "sys.argv = ['vllm-ampere', 'doctor', '--model', sys.argv[1]]\n"
        "vllm_ampere.main()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'triton', 'tilelang')"
        " or name.startswith('vllm.') and not name.startswith('vllm.ampere')])\n"
    )
    command = [sys.executable, "-c", code, checkpoint]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
