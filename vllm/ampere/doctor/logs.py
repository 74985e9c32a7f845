# SPDX-License-Identifier: Apache-2.0
"""Area 7: what a server's log shows, by the patterns of codes.toml, a line at a time."""

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Iterable, Iterator

from ..errors import UsageError
from .catalogue import Code, codes
from .findings import Finding, Status

# Of a longer line the rest is read as another line.
_LINE_BYTES = 1 << 16
# Looked through at once; most hold nothing.
_BATCH = 512
_SHOWN = 160
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
# Lines that look like an error: those that name one, else those that say so.
_ERRORS = (("Error: ", "Exception: "), ("ERROR", "CRITICAL", "FATAL"))
_LEVELS = ("DEBUG ", "INFO ", "WARNING ")
_UNNAMED = "AMP700"


@dataclass
class _Seen:
    """The first line that shows a code, and how many do."""

    number: int
    text: str
    count: int = 1


class _Watch:
    """One code, along a log."""

    def __init__(self, code: Code):
        self.code = code.code
        self._patterns = [pattern.split("...") for pattern in code.patterns]
        self._after, self._until = code.after, code.until
        self._counting = not code.after
        longest = [max(parts, key=len) for parts in self._patterns]
        self._words = [*longest, *self._after, *filter(None, [self._until])]

    def may_be_in(self, text: str) -> bool:
        """Quick, and never wrong where it says no."""
        return any(words in text for words in self._words)

    def is_shown_by(self, line: str) -> bool:
        if self._after:
            if any(words in line for words in self._after):
                self._counting = True
            elif self._until in line:
                self._counting = False
        return self._counting and any(_holds(line, parts) for parts in self._patterns)


def read_log(path: Path) -> list[Finding]:
    """What a log file shows.

    Returns:
        One finding for each code in it, in the order in which they first appear, since a later one often follows
        from an earlier one. Where none is, one that says so: ok, or "?" with the first line that looks like an error.

    Raises:
        UsageError: there is no such file, it is a folder, or it cannot be read.
    """
    hint = "name the file that has the server's output"
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a folder, not a log", hint)
        with path.open("rb") as file:
            return scan(_lines(file))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from error


def scan(lines: Iterable[str]) -> list[Finding]:
    """The same for lines of text."""
    watches = [_Watch(code) for code in codes().values() if code.patterns]
    seen: dict[str, _Seen] = {}
    errors: dict[int, _Seen] = {}
    read, lines = 0, iter(lines)
    while batch := list(islice(lines, _BATCH)):
        text = "".join(batch)
        near = [watch for watch in watches if watch.may_be_in(text)]
        if near or any(words in text for kind in _ERRORS for words in kind):
            for number, line in enumerate(batch, read + 1):
                shown = [watch.code for watch in near if watch.is_shown_by(line)]
                if shown and shown[0] in seen:
                    seen[shown[0]].count += 1
                elif shown:
                    seen[shown[0]] = _Seen(number, line)
                elif (kind := _error(line)) is not None:
                    errors.setdefault(kind, _Seen(number, line))
        read += len(batch)
    if seen:
        return [_finding(codes()[code], found) for code, found in seen.items()]
    entry = codes()[_UNNAMED]
    if not errors:
        return [Finding(_UNNAMED, entry.title, Status.OK, f"no failure in {read} lines")]
    first = errors[min(errors)]
    text = f"no known failure in {read} lines; the first error is line {first.number}: {_shown(first.text)}"
    return [Finding(_UNNAMED, entry.title, Status.UNKNOWN, text, entry.fix)]


def _finding(code: Code, found: _Seen) -> Finding:
    times = f" ({found.count} lines)" if found.count > 1 else ""
    status = Status.WARN if code.advice else Status.FAIL
    return Finding(code.code, code.title, status, f"line {found.number}{times}: {_shown(found.text)}", code.fix)


def _error(line: str) -> int | None:
    """Which of the kinds of errors a line is, None for none."""
    if any(level in line for level in _LEVELS):
        return None
    return next((kind for kind, words in enumerate(_ERRORS) if any(each in line for each in words)), None)


def _holds(line: str, parts: list[str]) -> bool:
    """All parts are in the line, one after another."""
    place = 0
    for part in parts:
        place = line.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def _lines(file: BinaryIO) -> Iterator[str]:
    while line := file.readline(_LINE_BYTES):
        yield _ESCAPE.sub("", line.decode(errors="replace"))


def _shown(line: str) -> str:
    """A line as it can be printed."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
