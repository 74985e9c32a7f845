# SPDX-License-Identifier: Apache-2.0
"""A vLLM tree and the series: which state it is in, and how it gets to the other one.

A tree is any folder that holds `vllm/`: site-packages, an unzipped wheel, an unpacked source archive or
a git checkout. Every file that the series touches is upstream's ("original"), ours ("patched"), or
neither, and then nothing is done to the tree at all.
"""

import errno
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from ..errors import PatchError, UsageError
from . import diff, series, transaction
from .series import Pair, Series, sha256

_PACKAGE = "vllm"
OVERLAY = Path(__file__).resolve().parents[1]
# Copies for an installed package; a tree that carries the overlay does not need them.
_NOT_EXPORTED = {"__pycache__", "_shipped"}

ORIGINAL, PATCHED, CHANGED, MISSING = "original", "patched", "changed", "missing"


@dataclass(frozen=True)
class Change:
    """One file that the series or the overlay makes a difference to.

    Attributes:
        path: relative to the tree.
        pair: hashes before and after.
        mode: permission bits where it is created.
        patches: names of the patches that touch it; empty for a file of the overlay.
        forward, backward: content before to content after, and back; None is no file.
    """

    path: str
    pair: Pair
    mode: int
    patches: tuple[str, ...]
    forward: Callable[[bytes | None], bytes | None]
    backward: Callable[[bytes | None], bytes | None]


@dataclass(frozen=True)
class FileState:
    """What one file of a tree is: its change, its state (a constant of this module) and its bytes (None: no file)."""

    change: Change
    state: str
    content: bytes | None


def locate(given: str | Path | None) -> Path:
    """The tree that was named, or the folder of the installed vLLM, found without importing it.

    Raises:
        UsageError: the folder is no vLLM tree.
        PatchError: no vLLM is installed.
    """
    if given is None:
        return _installed()
    root = Path(given).absolute()
    if (root / "vllm" / "__init__.py").is_file():
        return root
    if (root.parent / "vllm" / "__init__.py").is_file() and root.name == "vllm":
        raise UsageError(f"{given} is the package, not the tree", f"name the folder above it: {root.parent}")
    raise UsageError(f"{given} is not a vLLM tree: it holds no vllm/__init__.py", "name the folder that holds vllm/")


def _installed() -> Path:
    # Not importlib.util.find_spec: it answers from sys.modules, where the console script puts a stand-in.
    for finder in sys.meta_path:
        spec = finder.find_spec(_PACKAGE, None)
        if spec and spec.origin:
            return Path(spec.origin).parent.parent
    raise PatchError(
        f"no vLLM is installed for {sys.executable}",
        "name a tree, or use the Python that vLLM is installed in; `vllm-ampere patches fetch DIR` brings a tree",
    )


def release(root: Path) -> str | None:
    """The vLLM release that a tree says it is, or None (a git checkout does not say)."""
    try:
        found = re.search(r"^__version__ = .*'([^']+)'", (root / "vllm" / "_version.py").read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def series_changes(patches: Series) -> list[Change]:
    """What the series does, file by file, sorted by path."""

    def change(path: str) -> Change:
        names = tuple(patch.name for patch, _ in patches.of_path(path))
        return Change(
            path,
            patches.hashes[path],
            patches.mode(path),
            names,
            lambda content: patches.forward(path, content),
            lambda content: patches.backward(path, content),
        )

    return [change(path) for path in sorted(patches.hashes)]


def overlay_changes() -> list[Change]:
    """The files of this package, as files that a tree gains below `vllm/ampere`."""

    def change(file: Path) -> Change:
        content = file.read_bytes()
        path = "vllm/ampere/" + file.relative_to(OVERLAY).as_posix()
        mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
        return Change(path, Pair(None, sha256(content)), mode, (), lambda _: content, lambda _: None)

    files = sorted(file for file in OVERLAY.rglob("*") if file.is_file())
    return [change(file) for file in files if not _NOT_EXPORTED & set(file.relative_to(OVERLAY).parts)]


def survey(root: Path, changes: list[Change]) -> list[FileState]:
    """The state of each file; reads only."""
    states = []
    for change in changes:
        try:
            content = (root / change.path).read_bytes()
        except FileNotFoundError:
            content = None
        except OSError as error:
            what = f"cannot read {root / change.path}: {error.strerror}"
            raise PatchError(what, "look at its owner and mode") from error
        digest = sha256(content)
        if digest == change.pair.before:
            state = ORIGINAL
        elif digest == change.pair.after:
            state = PATCHED
        else:
            state = MISSING if content is None else CHANGED
        states.append(FileState(change, state, content))
    return states


def summary(root: Path, states: list[FileState]) -> str:
    """The tree in words: "interrupted", "not recognised", "applied", "not applied" or "partly applied"."""
    if transaction.interrupted(root):
        return "interrupted"
    seen = {file.state for file in states}
    if seen & {CHANGED, MISSING}:
        return "not recognised"
    if seen <= {PATCHED}:
        return "applied"
    return "not applied" if seen == {ORIGINAL} else "partly applied"


def refusal(root: Path, states: list[FileState], version: str) -> PatchError | None:
    """Why the tree cannot be patched or reverted: the error to raise, or None."""
    wrong = [file for file in states if file.state in (CHANGED, MISSING)]
    if not wrong:
        return None
    found = release(root)
    if found and found.partition("+")[0] != version:
        return PatchError(f"{root} holds vLLM {found}; the patches are for {version}", f"pip install vllm=={version}")
    path = wrong[0].change.path
    what = "is missing" if wrong[0].state == MISSING else f"is neither vLLM {version}'s nor the patched one"
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    if not wrong[0].change.patches:
        hint = f"another overlay is there: remove {root / 'vllm' / 'ampere'} first"
    else:
        hint = f"bring the original back (pip install --force-reinstall --no-deps vllm=={version}, or git checkout)"
    return PatchError(f"{root}: {path} {what}{more}", hint)


def apply(root: Path, changes: list[Change], version: str) -> tuple[list[str], bool]:
    """Patch the tree, or leave it as it was.

    Returns:
        The paths that were changed (none if all were patched already), and whether an interrupted run
        was rolled back first.

    Raises:
        PatchError: a file is neither original nor patched, or the tree cannot be written.
    """
    return _move(root, changes, version, ORIGINAL, lambda file: file.change.forward(file.content))


def revert(root: Path, changes: list[Change], version: str) -> tuple[list[str], bool]:
    """Give the tree its original bytes back; returns and raises as `apply` does."""
    return _move(root, changes, version, PATCHED, lambda file: file.change.backward(file.content))


def _move(
    root: Path, changes: list[Change], version: str, state: str, convert: Callable[[FileState], bytes | None]
) -> tuple[list[str], bool]:
    try:
        with transaction.locked(root):
            recovered = transaction.recover(root)
            states = survey(root, changes)
            if error := refusal(root, states, version):
                raise error
            writes = {
                file.change.path: transaction.Write(file.content, convert(file), file.change.mode)
                for file in states
                if file.state == state
            }
            if writes:
                transaction.replace_files(root, writes)
            return list(writes), recovered
    except OSError as error:
        why = error.strerror or error
        raise PatchError(f"cannot write to {root}, left as it was: {why}", _write_hint(error)) from error


def _write_hint(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "run it as the user who installed vLLM, or use a virtual environment of your own"
    if error.errno == errno.EROFS:
        return "the filesystem is read-only: patch a copy, or a virtual environment of your own"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make some room on that disk and run it again"
    return "mend that and run it again"


def refuse_own_overlay(root: Path) -> None:
    """Raise UsageError if the tree's `vllm/ampere` is the package that is running."""
    if (root / "vllm" / "ampere").resolve() == OVERLAY:
        raise UsageError(f"{root} runs this very overlay: it is neither copied nor removed", "leave --overlay out")


def export(root: Path, patches: Series) -> bytes:
    """One patch for `git apply` that takes an original tree to the patched one with the overlay.

    Args:
        root: a tree in either state; it is only read.
    """
    states = survey(root, series_changes(patches))
    if error := refusal(root, states, patches.version):
        raise error
    parts = []
    for file in states:
        change, content = file.change, file.content
        before = content if file.state == ORIGINAL else change.backward(content)
        after = content if file.state == PATCHED else change.forward(content)
        existing = root / change.path
        mode = existing.stat().st_mode if existing.exists() and change.pair.before else change.mode
        parts.append(diff.render(change.path, before, after, mode))
    parts += [diff.render(change.path, None, change.forward(None), change.mode) for change in overlay_changes()]
    return b"".join(parts)


def compute_hashes(root: Path, patches: tuple[series.Patch, ...]) -> dict[str, Pair]:
    """The pair of every touched file, from an original tree; proves that the series reverts exactly.

    Raises:
        PatchError: a patch does not apply, does not revert, or has no effect on a file in the end.
    """
    pairs = {}
    for path in series.touched(patches):
        source = root / path
        before = source.read_bytes() if source.is_file() else None
        after = series.run_forward([(p, f) for p in patches for f in p.files if f.path == path], before)
        pairs[path] = Pair(sha256(before), sha256(after))
        if before == after:
            raise PatchError(f"the patches leave {path} as it was", "drop those that undo each other")
    made = Series("", patches, pairs)
    for path, pair in pairs.items():
        source = root / path
        before = source.read_bytes() if pair.before else None
        made.backward(path, made.forward(path, before))
    return pairs


def refresh(root: Path, directory: Path, version: str) -> int:
    """Write `hashes.json` and `README.md` of the series in `directory`, from an original tree; returns its length.

    Raises:
        PatchError: the series breaks a rule, or does not fit the tree; nothing is written.
    """
    if found := series.problems(directory):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise PatchError(f"{found[0]}{more}", "mend the patch, then refresh")
    patches = series.read_patches(directory)
    hashes = compute_hashes(root, patches)
    (directory / series.HASHES).write_text(series.render_hashes(version, hashes))
    (directory / "README.md").write_text(series.render_readme(version, patches))
    return len(patches)
