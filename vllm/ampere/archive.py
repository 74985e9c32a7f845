# SPDX-License-Identifier: Apache-2.0
"""Archives that `upstream.toml` pins by hash, kept in a cache folder.

`environment.py` imports it before anything is installed, so it uses the standard library only.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Callable

if __package__:
    from .errors import AmpereError
else:  # beside a script: its folder is the first of sys.path
    from errors import AmpereError


def pinned(path: Path, sha256: str, bring: Callable[[Path], Path]) -> Path:
    """The archive `path`, brought first if it is not there with its hash.

    Args:
        path: its place in the cache.
        sha256: of its bytes, in hexadecimal.
        bring: downloads it into an empty folder, and names the file there.

    Raises:
        AmpereError: another file was brought; the cache is as it was.
    """
    if path.is_file() and _sha256(path) == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        brought = bring(Path(folder))
        if not brought.is_file() or _sha256(brought) != sha256:
            raise AmpereError(
                f"{brought.name} is not the file that upstream.toml pins (its sha256 differs)",
                f"ask another package index for {path.name}, or put that file into {path.parent}",
            )
        brought.replace(path)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
