# SPDX-License-Identifier: Apache-2.0
"""The entrance: `make`, and what continuous integration runs."""

import os
import re
import subprocess

from tests.repo.checkout import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def test_plain_make_prints_every_target():
    done = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    targets = re.findall(r"^([a-z-]+):", MAKEFILE, re.M)
    phony = re.search(r"^\.PHONY: (.*)", MAKEFILE, re.M)[1].split()
    assert listed == targets and sorted(phony) == sorted(targets)


def test_continuous_integration_runs_the_commands_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = script.read_text().splitlines()[-2:]
    assert commands == ["make test", "make test-image"]
    assert all(command in (ROOT / "README.md").read_text() for command in commands)


def test_continuous_integration_fails_when_a_test_fails(tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "Makefile").write_text("test:\n\t@echo '1 failed, 2 passed'; exit 1\n")
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0 and "1 failed, 2 passed" in done.stdout
