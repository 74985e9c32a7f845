# SPDX-License-Identifier: Apache-2.0
"""The console script in a process of its own, in an installation made of copies."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
HEADER = b"Do it\n\nClass: behaviour\nWhy: w\nGate: g\nOrigin: o\nRemove-when: r\n\n"
DIFF = b"""diff --git a/vllm/model.py b/vllm/model.py
--- a/vllm/model.py
+++ b/vllm/model.py
@@ -1,2 +1,3 @@
 one
+hook
 two
"""
# sha256sum of "one\ntwo\n" and of "one\nhook\ntwo\n".
HASHES = """{"vllm": "0.33.0", "files": {"vllm/model.py": {
"before": "c3f9c8c283a2b1f2f1896f27a01cbe3cddc0c9d93f752e4639035a0f5b36f6e8",
"after": "a7cc2b9f8b2dc4be40c3ee0ebddddce44670d77e030636580e242e75476702ef"}}}
"""


@dataclass(frozen=True)
class Ran:
    """Exit status and both streams of one run."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Site:
    """A folder laid out like site-packages, with the console script beside an overlay."""

    root: Path

    def run(self, *words: str, cwd: Path | None = None, **environment: str) -> Ran:
        """Run the script with the standard library alone: -S leaves every installed package out."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        done = subprocess.run(
            [sys.executable, "-S", self.root / "vllm_ampere.py", *words],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=cwd or self.root.parent,
            env=kept | environment,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def vllm(self, init: str = "", model: str = "one\ntwo\n") -> None:
        """Put a vLLM beside the overlay, with the given `__init__.py`."""
        (self.root / "vllm" / "__init__.py").write_text(init)
        (self.root / "vllm" / "model.py").write_text(model)


@pytest.fixture
def site(tmp_path) -> Site:
    root = tmp_path / "site"
    shutil.copytree(CHECKOUT / "vllm/ampere", root / "vllm/ampere", ignore=shutil.ignore_patterns("__pycache__", "_shipped"))
    shutil.copy(CHECKOUT / "vllm_ampere.py", root)
    shipped = root / "vllm/ampere/_shipped"
    (shipped / "patches").mkdir(parents=True)
    shutil.copy(CHECKOUT / "upstream.toml", shipped)
    (shipped / "patches/series").write_text("0010-model-hook.patch\n")
    (shipped / "patches/0010-model-hook.patch").write_bytes(HEADER + DIFF)
    (shipped / "patches/hashes.json").write_text(HASHES)
    return Site(root)
