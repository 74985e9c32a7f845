# SPDX-License-Identifier: Apache-2.0
"""The console script where vLLM is missing, hollow, broken or hostile, and the overlay is gone."""

import shutil

import pytest

BROKEN = {
    "raises": "raise ImportError('libcudart.so.13: cannot open shared object file')",
    "exits": "import os; os._exit(3)",
    "syntax": "def (",
    "hangs": "import time; time.sleep(1000)",
}


@pytest.mark.parametrize("init", BROKEN.values(), ids=BROKEN)
def test_a_broken_vllm_is_found_patched_and_never_run(site, init):
    site.vllm(init)
    ran = site.run("patches", "status")
    assert (ran.status, ran.out.splitlines()[-1]) == (1, f"not applied: 1 patches, {site.root}")
    assert site.run("patches", "apply").status == 0
    assert (site.root / "vllm/model.py").read_text() == "one\nhook\ntwo\n"
    ran = site.run("env")
    assert ran.status == 0 and "applied: 1 patches for vLLM 0.33.0" in ran.out and not ran.err


@pytest.mark.parametrize("beside", ["nothing", "a hollow namespace"])
def test_no_vllm(site, beside):
    if beside == "a hollow namespace":
        (site.root / "vllm/models").mkdir()
    ran = site.run("patches", "status")
    assert ran.status == 1 and not ran.out
    assert ran.err.splitlines()[0].startswith("error: no vLLM is installed for ")
    assert ran.err.splitlines()[1].startswith("hint: ") and len(ran.err.splitlines()) == 2
    ran = site.run("env")
    assert ran.status == 0 and "unknown (PatchError: no vLLM is installed" in ran.out
    assert site.run("--version").out.startswith("vllm-ampere ")


def test_the_command_line_cannot_import_vllm_itself(site):
    site.vllm()
    (site.root / "vllm/ampere/cli/env.py").write_text("from vllm import model\n")
    ran = site.run("env")
    assert ran.status == 1 and "does not load: ImportError: cannot import name 'model' from 'vllm'" in ran.err


@pytest.mark.parametrize("damage, cause", [
    (lambda overlay: shutil.rmtree(overlay), "FileNotFoundError"),
    (lambda overlay: shutil.rmtree(overlay / "cli"), "ModuleNotFoundError: No module named 'vllm.ampere.cli'"),
    (lambda overlay: (overlay / "errors.py").write_text("def ("), "SyntaxError"),
])
def test_a_damaged_overlay(site, damage, cause):
    damage(site.root / "vllm/ampere")
    ran = site.run("env")
    error, hint = ran.err.splitlines()
    assert (ran.status, ran.out) == (1, "")
    assert error.startswith("error: the overlay ") and f" does not load: {cause}" in error
    assert hint == "hint: pip install --force-reinstall --no-deps vllm-ampere"
