# SPDX-License-Identifier: Apache-2.0
"""Unified diffs in git's form, on bytes: parse, apply, reverse, write.

Application is exact. A hunk goes where it says, or, if those lines moved, to the one place in the
file that matches it byte for byte; it is never bent to fit. Edits, created and deleted text files are
all there is: renames, mode changes and binary files are refused.
"""

import difflib
import hashlib
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from ..errors import PatchError

_FILE = re.compile(rb"diff --git a/(\S+) b/(\S+)\n")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_MODE = re.compile(rb"(new|deleted) file mode 100(644|755)\n")
_NO_NEWLINE = b"\\ No newline at end of file\n"


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their "\\n"; unlike `bytes.splitlines`, a lone carriage return ends nothing."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


@dataclass(frozen=True)
class Hunk:
    """One run of changed lines with its context.

    Attributes:
        old_start, new_start: 1-based line at which each side starts; 0 if that side is an empty file.
        old, new: the lines of each side, context included, each with its "\\n" if it has one.
        added: lines that only the new side has.
    """

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    added: int

    @property
    def first(self) -> int:
        """Index at which the old side stands by its own account."""
        return max(self.old_start - 1, 0)

    def reversed(self) -> "Hunk":
        """The hunk that undoes this one."""
        removed = self.added + len(self.old) - len(self.new)
        return Hunk(self.new_start, self.old_start, self.new, self.old, removed)


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file.

    Attributes:
        path: relative to the tree, with forward slashes.
        kind: "edit", "create" or "delete".
        mode: permission bits of a created file, 0o644 or 0o755.
        hunks: in file order.
    """

    path: str
    kind: str
    mode: int
    hunks: tuple[Hunk, ...]

    def reversed(self) -> "FileDiff":
        """The diff that undoes this one."""
        kind = {"edit": "edit", "create": "delete", "delete": "create"}[self.kind]
        return FileDiff(self.path, kind, self.mode, tuple(hunk.reversed() for hunk in self.hunks))

    def apply(self, content: bytes | None) -> bytes | None:
        """The file after this diff; None stands for no file, before and after.

        Raises:
            PatchError: a hunk matches nowhere or in several places, or the file is there when it should not be.
        """
        if (content is None) != (self.kind == "create"):
            raise PatchError(f"{self.path} {'does not exist' if content is None else 'exists already'}")
        lines = split_lines(content or b"")
        result: list[bytes] = []
        done = drift = 0
        for hunk in self.hunks:
            at = self._place(hunk, lines, done, drift)
            result += lines[done:at]
            result += hunk.new
            done = at + len(hunk.old)
            drift = at - hunk.first
            if done < len(lines) and hunk.new and not hunk.new[-1].endswith(b"\n"):
                raise PatchError(f"{self.path}: hunk at line {hunk.old_start} ends the file, but lines follow")
        result += lines[done:]
        if self.kind != "delete":
            return b"".join(result)
        if result:
            raise PatchError(f"{self.path} is to be deleted, but has lines that the patch does not know")
        return None

    def _place(self, hunk: Hunk, lines: list[bytes], done: int, drift: int) -> int:
        """Index of the line where the hunk's old side starts."""
        size = len(hunk.old)
        stated = hunk.first + drift
        found = [at for at in range(done, len(lines) - size + 1) if tuple(lines[at:at + size]) == hunk.old]
        if stated in found and (size or not lines):
            return stated
        if len(found) == 1 and size:
            return found[0]
        places = f"{len(found)} places" if found and size else "nothing"
        raise PatchError(f"{self.path}: hunk at line {hunk.old_start} matches {places}")


class _Lines:
    """The lines of a patch with a position, and errors that name it."""

    def __init__(self, text: bytes, name: str, first: int):
        self.lines, self.name, self.first, self.at = split_lines(text), name, first, 0

    def peek(self) -> bytes:
        return self.lines[self.at] if self.at < len(self.lines) else b""

    def take(self) -> bytes:
        line = self.peek()
        self.at += 1
        return line

    def error(self, what: str) -> PatchError:
        return PatchError(f"{self.name}:{self.first + self.at}: {what}", "write patches with `git diff`")


def parse(text: bytes, name: str, first_line: int = 1) -> tuple[FileDiff, ...]:
    """The file diffs of `text`, which starts with "diff --git" or is empty.

    Args:
        name: what errors call the patch.
        first_line: line number of the start of `text` in it.

    Raises:
        PatchError: anything that is not a plain git diff of text files, named by line.
    """
    source = _Lines(text, name, first_line)
    found: dict[str, FileDiff] = {}
    while source.peek():
        diff = _parse_file(source)
        if diff.path in found:
            raise source.error(f"{diff.path} is changed twice")
        found[diff.path] = diff
    return tuple(found.values())


def _parse_file(source: _Lines) -> FileDiff:
    start = _FILE.fullmatch(source.peek())
    if not start or start[1] != start[2]:
        raise source.error("expected `diff --git a/PATH b/PATH` with one path")
    path = start[1].decode()
    if ".." in PurePosixPath(path).parts or path.startswith("/"):
        raise source.error(f"{path} leaves the tree")
    source.take()
    kind, mode = "edit", 0o644
    if has_mode := _MODE.fullmatch(source.peek()):
        kind = "create" if has_mode[1] == b"new" else "delete"
        mode = int(has_mode[2], 8)
        source.take()
    if source.peek().startswith(b"index "):
        source.take()
    if source.peek().startswith(b"diff --git ") or not source.peek():
        if kind == "edit":
            raise source.error(f"{path} has no change")
        return FileDiff(path, kind, mode, ())
    old = b"/dev/null" if kind == "create" else b"a/" + start[1]
    new = b"/dev/null" if kind == "delete" else b"b/" + start[1]
    for wanted in (b"--- " + old, b"+++ " + new):
        if source.peek().rstrip(b"\n") != wanted:
            raise source.error(f"expected `{wanted.decode()}`")
        source.take()
    hunks = []
    while source.peek().startswith(b"@@"):
        hunks.append(_parse_hunk(source))
    if not hunks:
        raise source.error(f"{path} has no hunk")
    return FileDiff(path, kind, mode, tuple(hunks))


def _parse_hunk(source: _Lines) -> Hunk:
    head = _HUNK.match(source.peek())
    if not head:
        raise source.error("malformed hunk header")
    old_start, old_size, new_start, new_size = (int(n) if n is not None else 1 for n in head.groups())
    if (old_start and not old_size) or (new_start and not new_size):
        raise source.error("a hunk needs a line of context")
    source.take()
    old: list[bytes] = []
    new: list[bytes] = []
    sides: list[list[bytes]] = []
    added = 0
    while len(old) < old_size or len(new) < new_size or source.peek() == _NO_NEWLINE:
        line = source.peek()
        sign, rest = (b" ", b"\n") if line == b"\n" else (line[:1], line[1:])
        if line == _NO_NEWLINE and sides:
            for side in sides:
                side[-1] = side[-1].removesuffix(b"\n")
        elif sign in (b" ", b"-", b"+") and line:
            sides = [side for side, signs in ((old, b" -"), (new, b" +")) if sign in signs]
            for side in sides:
                side.append(rest)
            added += sign == b"+"
        else:
            raise source.error("a hunk line starts with a space, + or -")
        source.take()
    if (len(old), len(new)) != (old_size, new_size):
        raise source.error(f"the hunk has {len(old)} and {len(new)} lines, its header says {old_size} and {new_size}")
    return Hunk(old_start, new_start, tuple(old), tuple(new), added)


def render(path: str, before: bytes | None, after: bytes | None, mode: int) -> bytes:
    """The diff that `git apply` takes from `before` to `after`; None stands for no file.

    Args:
        mode: permission bits of the file; git knows 0o644 and 0o755.

    Raises:
        PatchError: the file is not text.
    """
    if b"\0" in (before or b"") + (after or b""):
        raise PatchError(f"{path} is not a text file")
    name = path.encode()
    git_mode = b"100755" if mode & 0o100 else b"100644"
    out = [b"diff --git a/%s b/%s\n" % (name, name)]
    ids = b"index %s..%s" % (_blob_id(before), _blob_id(after))
    if before is None:
        out += [b"new file mode %s\n" % git_mode, ids + b"\n"]
    elif after is None:
        out += [b"deleted file mode %s\n" % git_mode, ids + b"\n"]
    else:
        out.append(ids + b" %s\n" % git_mode)
    body = difflib.diff_bytes(
        difflib.unified_diff,
        split_lines(before or b""),
        split_lines(after or b""),
        b"/dev/null" if before is None else b"a/" + name,
        b"/dev/null" if after is None else b"b/" + name,
    )
    out += (line if line.endswith(b"\n") else line + b"\n" + _NO_NEWLINE for line in body)
    return b"".join(out)


def _blob_id(content: bytes | None) -> bytes:
    """git's name of the content, which lets `git apply --3way` find the original."""
    if content is None:
        return b"0" * 40
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest().encode()
