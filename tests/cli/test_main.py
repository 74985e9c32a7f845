# SPDX-License-Identifier: Apache-2.0
"""Exit status and streams of the command line."""

import json
import os
import subprocess
import sys

import pytest

from vllm.ampere.cli import main as cli
from vllm.ampere.errors import AmpereError


@pytest.mark.parametrize("words, message, hint", [
    (["pathces"], "there is no 'pathces'", "did you mean patches?"),
    (["patches", "aply"], "there is no 'aply'", "did you mean apply?"),
    (["patches", "status", "--fromat", "json"], "there is no '--fromat'", "did you mean --format?"),
    (["patches", "status", "--fromat=json"], "there is no '--fromat'", "did you mean --format?"),
    (["patches", "status", "--format", "jsn"], "there is no 'jsn'", "did you mean json?"),
    (["patches", "status", "--form", "json"], "there is no '--form'", "did you mean --format?"),
    (["kernels", "explain"], "arguments are required: OP", "see `vllm-ampere kernels explain --help`"),
    (["zzz"], "there is no 'zzz'", "see `vllm-ampere --help`"),
    ([], "arguments are required: COMMAND", "see `vllm-ampere --help`"),
    (["kernels", "explain", "inverse_rop"], "there is no op 'inverse_rop'", "did you mean inverse_rope?"),
])
def test_usage_errors_are_one_line_and_a_hint(capsys, words, message, hint):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 2
    assert lines[0].startswith("error: ") and message in lines[0]
    assert lines[1].startswith("hint: ") and hint in lines[1]


@pytest.mark.parametrize("words", [["--help"], ["patches", "apply", "--help"], ["--version"]])
def test_help_and_version_are_data(capsys, words):
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert out and not err


def raising(monkeypatch, error):
    def run(arguments, console):
        raise error

    monkeypatch.setattr(cli.env, "_run", run)


@pytest.mark.parametrize("error, status, line", [
    (AmpereError("it\nbroke", "mend it"), 1, "error: it broke\nhint: mend it\n"),
    (AmpereError("it broke"), 1, "error: it broke\n"),
    (KeyboardInterrupt(), 130, "error: interrupted\n"),
    (KeyError("x"), 70, "error: this is a fault of ours: KeyError: 'x'\nhint: run it again with VLLM_AMPERE_TRACEBACK=1 "
     "and report what it prints, with `vllm-ampere env`\n"),
])
def test_failures(capsys, monkeypatch, error, status, line):
    raising(monkeypatch, error)
    assert cli.main(["env"]) == status
    assert capsys.readouterr() == ("", line)


def test_traceback_on_request(capsys, monkeypatch):
    raising(monkeypatch, KeyError("x"))
    monkeypatch.setenv("VLLM_AMPERE_TRACEBACK", "1")
    assert cli.main(["env"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_nobody_reads_the_output(site):
    """The pipe is closed before the command writes: no traceback, and the status a shell expects."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-S", site.root / "vllm_ampere.py", "env"], stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


def test_colour_only_on_a_terminal(site):
    assert "\033" not in site.run("zzz").err
    parent, child = os.openpty()
    command = [sys.executable, "-S", site.root / "vllm_ampere.py", "zzz"]
    for settings, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        environment = {"PATH": os.environ["PATH"]} | settings
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=child, timeout=60, env=environment)
        assert (b"\033[31merror\033[0m: " in os.read(parent, 4096)) == coloured
    os.close(parent)
    os.close(child)


def test_kernels_list_and_explain(capsys):
    assert cli.main(["kernels", "list", "--format", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["inverse_rope"]["family"] == "attention"
    assert rows["inverse_rope"]["implementations"][-1] == "reference"
    assert rows["inverse_rope"]["replaces"] == "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant"

    assert cli.main(["kernels", "list"]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "family", "implementations", "replaces", "summary"]
    assert [line.split()[0] for line in lines] == list(rows)

    assert cli.main(["kernels", "explain", "inverse_rope", "--format", "json"]) == 0
    op = json.loads(capsys.readouterr().out)
    assert op["inputs"][0] == {"name": "o", "dtypes": ["bfloat16"], "shape": "[T, H, 512]", "note": ""}
    assert op["tolerances"]["o"]["relative_norm"] > 0 and op["runs"][-1]["architectures"] == ["cpu"]

    assert cli.main(["kernels", "explain", "inverse_rope"]) == 0
    assert "cos_sin    float32   [M, 64]" in capsys.readouterr().out


@pytest.fixture
def compiled(monkeypatch):
    """What `kernels compile` finds, without compiling; a list to fill."""
    from vllm.ampere.testing import kernel_table

    found = []
    monkeypatch.setattr(kernel_table, "rows", lambda: found)
    monkeypatch.setattr(kernel_table, "compilers", lambda: "Triton 0")
    return found


ROW = {"kernel": "copy", "constants": "N=8", "pointers": "u8", "warps": "4", "registers": "16", "shared bytes": "0",
       "spilled bytes": "0", "faults": []}


def test_kernels_compile(capsys, compiled, tmp_path):
    compiled.append(ROW)
    assert cli.main(["kernels", "compile", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"compiled_by": "Triton 0", "rows": [ROW]}
    document = tmp_path / "kernels.md"
    document.write_text("before\n<!-- kernels: begin, written by `make kernel-table` -->\nold\n<!-- kernels: end -->\n")
    assert cli.main(["kernels", "compile", "--update", str(document)]) == 0
    assert "| copy | N=8 | u8 | 4 | 16 | 0 | 0 |\n<!-- kernels: end -->\n" in document.read_text()
    compiled[0] = ROW | {"faults": ["sm86: 101377 bytes of shared memory, sm86 has 101376"]}
    assert cli.main(["kernels", "compile"]) == 1
    assert "sm86 has 101376" in capsys.readouterr().out


def test_kernels_compile_keeps_a_document_it_cannot_update(capsys, compiled, tmp_path):
    (tmp_path / "empty.md").write_text("nothing\n")
    for name, words in (("empty.md", "no place for the table"), ("absent.md", "cannot read")):
        assert cli.main(["kernels", "compile", "--update", str(tmp_path / name)]) == 1
        error, hint = capsys.readouterr().err.splitlines()[-2:]
        assert words in error and hint.startswith("hint: ")
    assert (tmp_path / "empty.md").read_text() == "nothing\n"


def test_kernels_without_pytorch(site):
    ran = site.run("kernels", "list")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err == "error: the ops need PyTorch, which is not installed\nhint: install vLLM, or PyTorch alone\n"


def test_env_says_unknown_and_keeps_secrets(site):
    (site.root / "vllm/ampere/_shipped/upstream.toml").write_text("[")
    ran = site.run("env", "--format", "json", VLLM_API_KEY="secret", VLLM_AMPERE_KERNELS="a=b", PATH="")
    facts = json.loads(ran.out)
    assert ran.status == 0 and not ran.err and "secret" not in ran.out
    assert facts["VLLM_AMPERE_KERNELS"] == "a=b"
    assert facts["gpus"] == facts["nvcc"] == "not found" and facts["torch"] == "not installed"
    assert facts["patches"].startswith("unknown (")
    assert facts["python"].startswith("{}.{}.{} ".format(*sys.version_info))


def test_env_survives_every_probe_failing(capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("two\nlines")

    for name in ("_package", "_patches", "_processor", "_gpus", "_output"):
        monkeypatch.setattr(cli.env, name, fail)
    for name in ("python_version", "system", "release"):
        monkeypatch.setattr(cli.env.platform, name, fail)
    assert cli.main(["env", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == facts["torch"] == facts["gpus"] == "unknown (RuntimeError: two lines)"
