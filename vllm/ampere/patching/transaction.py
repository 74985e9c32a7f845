# SPDX-License-Identifier: Apache-2.0
"""Replace several files of a tree, all of them or none, whatever happens half-way.

The journal is a folder in the tree, so on its filesystem. First it gets a copy of each original and the
finished replacement, flushed to disk; then a list of both, by hash; only then are files renamed into
place. Removing the list is the commit point. An error or an interrupt before it rolls back at once. A
killed process leaves the journal, and `recover` rolls back on the next run. Rolling back needs no disk
space, because it renames the copies into place, and may itself be interrupted, because a file's hash
tells whether it has been done.

Files are replaced, never written to, so that a hard link elsewhere (uv links installed files to its
cache) keeps the original.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Iterator, Mapping

from ..errors import PatchError

JOURNAL = "vllm/.ampere-journal"
_LIST = "list.json"


@dataclass(frozen=True)
class Write:
    """What becomes of one file.

    Attributes:
        old: its bytes now, None if it does not exist.
        new: its bytes afterwards, None to remove it.
        mode: permission bits if it is created; an existing file keeps its own.
    """

    old: bytes | None
    new: bytes | None
    mode: int = 0o644


@dataclass(frozen=True)
class _Entry:
    """A file in the journal's list, with SHA-256 of its bytes before and after (None: no file)."""

    path: str
    old: str | None
    new: str | None


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Keep other processes from changing the same tree; the lock ends with the process.

    Raises:
        PatchError: another process holds it.
    """
    descriptor = os.open(root / "vllm", os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PatchError(f"another process is patching {root}", "wait until it has ended") from None
        except OSError as error:
            # A network filesystem may not lock folders; the hashes still refuse a tree in between.
            if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOTSUP):
                raise
        yield
    finally:
        os.close(descriptor)


def replace_files(root: Path, writes: Mapping[str, Write]) -> None:
    """Do all writes or none. The caller holds `locked` and has called `recover`.

    Args:
        root: the tree; paths are relative to it.

    Raises:
        OSError: the tree is as it was.
        PatchError: a file is no longer `old`, and the tree is as it was; or rolling back failed, and says so.
    """
    journal = root / JOURNAL
    journal.mkdir()
    try:
        entries = [_stage(root, journal, index, path, write) for index, (path, write) in enumerate(writes.items())]
        made = [str(folder.relative_to(root)) for folder in _missing_folders(root, writes)]
        listed = {"files": [asdict(entry) for entry in entries], "folders": made}
        _write_flushed(journal / "list.partial", json.dumps(listed).encode())
        os.replace(journal / "list.partial", journal / _LIST)
        _flush_folder(journal)
        for index, entry in enumerate(entries):
            _put(root / entry.path, journal / f"{index}.new" if entry.new else None)
        _flush_folders(root, entries)
        (journal / _LIST).unlink()
    except BaseException as cause:
        try:
            recover(root)
        except OSError as error:
            raise PatchError(
                f"{root} is half changed: {cause}, then {error} while rolling back",
                f"mend that and run the command again: it rolls back first; {journal} holds the originals",
            ) from error
        raise
    with contextlib.suppress(OSError):
        _flush_folder(journal)
        shutil.rmtree(journal)
    for path, write in writes.items():
        if write.new is None:
            _remove_empty_folders(root, (root / path).parent)


def interrupted(root: Path) -> bool:
    """Whether an earlier run was killed before it was done."""
    return (root / JOURNAL).exists()


def recover(root: Path) -> bool:
    """Roll back what a killed run left; returns whether there was anything to do.

    Raises:
        PatchError: a file was changed by someone else since.
        OSError: the tree cannot be written; the next call goes on.
    """
    journal = root / JOURNAL
    if not journal.exists():
        return False
    if (journal / _LIST).exists():
        content = json.loads((journal / _LIST).read_text())
        entries = [_Entry(**fields) for fields in content["files"]]
        for index, entry in enumerate(entries):
            _roll_back(root / entry.path, entry, journal / f"{index}.old")
        for folder in reversed(content["folders"]):
            with contextlib.suppress(OSError):
                (root / folder).rmdir()
        _flush_folders(root, entries)
        (journal / _LIST).unlink()
    shutil.rmtree(journal)
    return True


def _roll_back(target: Path, entry: _Entry, original: Path) -> None:
    now = _digest(target)
    if now == entry.old:
        return
    if now != entry.new:
        mend = f"copy {original} over it" if entry.old else "delete it"
        raise PatchError(f"{target} was changed after an interrupted run", f"{mend}, then run the command again")
    _put(target, original if entry.old else None)


def _stage(root: Path, journal: Path, index: int, path: str, write: Write) -> _Entry:
    """Put the original and the replacement of one file into the journal."""
    target, original, replacement = root / path, journal / f"{index}.old", journal / f"{index}.new"
    entry = _Entry(path, _hash(write.old), _hash(write.new))
    if _digest(target) != entry.old:
        raise PatchError(f"{target} changed a moment ago", "run the command again")
    mode, owner = write.mode, None
    if write.old is not None:
        status = target.stat()
        mode, owner = stat.S_IMODE(status.st_mode), status
        _write_flushed(original, write.old)
        _give(original, mode, owner)
        os.utime(original, ns=(status.st_atime_ns, status.st_mtime_ns))
    if write.new is not None:
        _write_flushed(replacement, write.new)
        _give(replacement, mode, owner)
    return entry


def _give(path: Path, mode: int, owner: os.stat_result | None) -> None:
    os.chmod(path, mode)
    if owner and (owner.st_uid, owner.st_gid) != (os.geteuid(), os.getegid()):
        with contextlib.suppress(PermissionError):
            os.chown(path, owner.st_uid, owner.st_gid)


def _put(target: Path, source: Path | None) -> None:
    """Rename `source` to `target`, or remove `target` if there is none.

    Its compiled bytecode goes too: Python would compare times before using it, except where it was
    compiled unchecked, as some images do, and then the patch would be on disk and never run.
    """
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)
    if source is None:
        target.unlink()
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(source, target)


def _missing_folders(root: Path, writes: Mapping[str, Write]) -> list[Path]:
    """Folders that the created files need, parents first."""
    needed = {parent for path, write in writes.items() if write.new is not None for parent in (root / path).parents}
    return sorted((folder for folder in needed if not folder.exists()), key=lambda folder: len(folder.parts))


def _remove_empty_folders(root: Path, folder: Path) -> None:
    """Remove the folder of a deleted file, and those above it, as far as they are empty."""
    with contextlib.suppress(OSError):
        (folder / "__pycache__").rmdir()
    with contextlib.suppress(OSError):
        while folder != root:
            folder.rmdir()
            folder = folder.parent


def _write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush_folders(root: Path, entries: list[_Entry]) -> None:
    """Make the renames last through a power cut."""
    for folder in {(root / entry.path).parent for entry in entries}:
        if folder.exists():
            _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hash(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def _digest(path: Path) -> str | None:
    try:
        return _hash(path.read_bytes())
    except FileNotFoundError:
        return None
