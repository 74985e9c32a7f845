# SPDX-License-Identifier: Apache-2.0
"""The source archive from the package index: patched by our tool and, on another copy, by git."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.vllm]


def tool(*words):
    script = Path(sys.executable).parent / "vllm-ampere"
    return subprocess.run([script, "patches", *map(str, words)], text=True, capture_output=True, timeout=1800)


def contents(tree):
    return {path.relative_to(tree): path.read_bytes() for path in sorted(tree.rglob("*")) if path.is_file()}


def test_fetch_apply_revert_and_git_apply(tmp_path):
    tree, checkout, diff = tmp_path / "tree", tmp_path / "checkout", tmp_path / "ampere.patch"
    fetched = tool("fetch", "--sdist", tree)
    assert fetched.returncode == 0, fetched.stderr
    assert (tree / "csrc").is_dir()
    original = contents(tree)
    shutil.copytree(tree, checkout)

    exported = tool("export", checkout, "--output", diff)
    assert exported.returncode == 0, exported.stderr
    subprocess.run(["git", "init", "-q", checkout], check=True)
    subprocess.run(["git", "-C", checkout, "apply", diff], check=True)
    assert tool("status", checkout).returncode == 0

    applied = tool("apply", tree)
    assert applied.returncode == 0, applied.stderr
    by_tool, by_git = contents(tree), contents(checkout)
    edited = {path for path in original if by_tool[path] != original[path]}
    assert edited and edited == {path for path in original if by_git[path] != original[path]}
    assert all(by_tool[path] == by_git[path] for path in edited)

    reverted = tool("revert", tree)
    assert reverted.returncode == 0, reverted.stderr
    after = contents(tree)
    assert {path: after.get(path) for path in original} == original
