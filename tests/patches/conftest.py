# SPDX-License-Identifier: Apache-2.0
"""A small tree, a series onto it written by real git, and the pinned upstream tree."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm.ampere import upstream
from vllm.ampere.patching import series, tree

VERSION = "0.33.0"
BEFORE = {
    "vllm/__init__.py": b"# top\n",
    "vllm/_version.py": b"__version__ = version = '0.33.0'\n",
    "vllm/model.py": b"".join(b"line %d\n" % n for n in range(40)),
    "vllm/layers/norm.py": b"def norm(x):\n    return x\n\n\ndef other(x):\n    return x\n",
    "vllm/layers/empty.py": b"",
    "vllm/tail.py": "first\nsecond é\r\nlast without newline".encode(),
    "vllm/old/gone.py": b"to be deleted\nas a whole\n",
}
# The state after each patch, as edits of the one before, written by hand.
STEPS = (
    {
        "vllm/model.py": lambda c: c.replace(b"line 7\n", b"line 7\nhook a\nhook b\n").replace(b"line 30\n", b""),
        "vllm/layers/norm.py": lambda c: c.replace(b"return x\n\n", b"return x + 1\n\n"),
    },
    {
        "vllm/model.py": lambda c: c.replace(b"hook b\n", b"hook B\n").replace(b"line 39\n", b"line 39\nend"),
        "vllm/extra/deep/hook.py": lambda c: b"#!/bin/sh\nnew file\n",
        "vllm/layers/empty.py": lambda c: b"no longer empty\n",
    },
    {
        "vllm/old/gone.py": lambda c: None,
        "vllm/tail.py": lambda c: c + b"\n",
    },
)
HEADER = """Do step {n} of the example

Class: extension-point
Why: because the example needs it
  in two lines
Gate: capability 8 | nothing else
Origin: ours
Remove-when: upstream has it

"""


def write_tree(root: Path, files: dict[str, bytes | None]) -> Path:
    for path, content in files.items():
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
    return root


def read_tree(root: Path) -> dict[str, bytes]:
    """Every file of a tree but the journal's."""
    files = (file for file in root.rglob("*") if file.is_file())
    return {
        file.relative_to(root).as_posix(): file.read_bytes() for file in files if not {".ampere-journal", ".git"} & set(file.parts)
    }


def run_git(root: Path, *arguments: str, **options) -> bytes:
    settings = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "core.autocrlf=false")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    return subprocess.run(
        ["git", *settings, *arguments], cwd=root, check=True, capture_output=True, env=environment, **options
    ).stdout


@dataclass(frozen=True)
class Example:
    """The series folder, loaded, and what it makes of BEFORE."""

    directory: Path
    series: series.Series
    before: dict[str, bytes]
    after: dict[str, bytes]

    @property
    def changes(self) -> list[tree.Change]:
        return tree.series_changes(self.series)


@pytest.fixture(scope="session")
def example(tmp_path_factory) -> Example:
    directory = tmp_path_factory.mktemp("series")
    work = write_tree(tmp_path_factory.mktemp("work"), BEFORE)
    original = write_tree(tmp_path_factory.mktemp("original"), BEFORE)
    run_git(work, "init", "-q")
    run_git(work, "add", "-A")
    run_git(work, "commit", "-qm", "before")
    names = []
    for number, edits in enumerate(STEPS, 1):
        for path, edit in edits.items():
            file = work / path
            content = edit(file.read_bytes() if file.exists() else None)
            if content is None:
                file.unlink()
            else:
                write_tree(work, {path: content})
                file.chmod(0o755 if content.startswith(b"#!") else 0o644)
        run_git(work, "add", "-A")
        names.append(f"{number * 10:04d}-example-do-step-{'abc'[number - 1]}.patch")
        (directory / names[-1]).write_bytes(HEADER.format(n=number).encode() + run_git(work, "diff", "--cached"))
        run_git(work, "commit", "-qm", names[-1])
    (directory / "series").write_text("# order\n\n" + "\n".join(names) + "\n")
    tree.refresh(original, directory, VERSION)
    return Example(directory, series.load(directory, VERSION), BEFORE, read_tree(work))


@pytest.fixture
def git():
    """Runs real git in a folder, with settings of its own."""
    return run_git


@pytest.fixture
def root(tmp_path) -> Path:
    """A fresh unpatched tree."""
    return write_tree(tmp_path / "site", BEFORE)


@pytest.fixture(scope="session")
def upstream_tree(tmp_path_factory) -> Path:
    """The pinned wheel's Python tree, unpacked from the checkout's cache (fetched if it is not there)."""
    folder = tmp_path_factory.mktemp("upstream") / "tree"
    upstream.fetch(folder, sdist=False, log=print)
    return folder
