# SPDX-License-Identifier: Apache-2.0
"""Area 7: what a server's log shows, by the patterns of codes.toml, a line at a time."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Iterable, Iterator

from ..errors import UsageError
from .catalogue import Code, codes
from .findings import Finding, Status

# Of a longer line the rest is read as another line.
_LINE_BYTES = 1 << 16
_SHOWN = 160
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_ERROR = re.compile(r"\b(ERROR|CRITICAL|FATAL)\b|\b\w*(Error|Exception)\b: ")
_UNNAMED = "AMP700"


@dataclass
class _Seen:
    """The first line that shows a code, and how many do."""

    number: int
    text: str
    count: int = 1


def read_log(path: Path) -> list[Finding]:
    """What a log file shows.

    Returns:
        One finding for each code in it, in the order in which they first appear, since a later one often follows
        from an earlier one. Where none is, one that says so: ok, or "?" with the last line that looks like an error.

    Raises:
        UsageError: there is no such file, it is a folder, or it cannot be read.
    """
    hint = "name the file that has the server's output"
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a log", hint)
    try:
        with path.open("rb") as file:
            return scan(_lines(file))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from error


def scan(lines: Iterable[str]) -> list[Finding]:
    """The same for lines of text."""
    patterns = [(code, re.compile("|".join(f"(?:{each})" for each in code.patterns))) for code in codes().values()
                if code.patterns]
    phases = {code.code: tuple(map(re.compile, code.during)) for code, _ in patterns if code.during}
    ended = set(phases)
    seen: dict[str, _Seen] = {}
    number, last_error = 0, None
    for number, line in enumerate(lines, 1):
        for phase, (start, end) in phases.items():
            if start.search(line):
                ended.discard(phase)
            elif end.search(line):
                ended.add(phase)
        code = next((code for code, pattern in patterns if code.code not in ended and pattern.search(line)), None)
        if code is None:
            last_error = _Seen(number, line) if _ERROR.search(line) else last_error
        elif code.code in seen:
            seen[code.code].count += 1
        else:
            seen[code.code] = _Seen(number, line)
    if seen:
        return [_finding(codes()[code], found) for code, found in seen.items()]
    entry = codes()[_UNNAMED]
    if last_error is None:
        return [Finding(_UNNAMED, entry.title, Status.OK, f"no failure in {number} lines")]
    text = f"no known failure in {number} lines; the last error is line {last_error.number}: {_shown(last_error.text)}"
    return [Finding(_UNNAMED, entry.title, Status.UNKNOWN, text, entry.fix)]


def _finding(code: Code, found: _Seen) -> Finding:
    times = f" ({found.count} lines)" if found.count > 1 else ""
    status = Status.WARN if code.advice else Status.FAIL
    return Finding(code.code, code.title, status, f"line {found.number}{times}: {_shown(found.text)}", code.fix)


def _lines(file: BinaryIO) -> Iterator[str]:
    while line := file.readline(_LINE_BYTES):
        yield _ESCAPE.sub("", line.decode(errors="replace"))


def _shown(line: str) -> str:
    """A line as it can be printed."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in line).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
