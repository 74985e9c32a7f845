# SPDX-License-Identifier: Apache-2.0
"""Everything that a command prints: data to stdout; progress, warnings, errors and hints to stderr."""

import json
import sys
from typing import Any, Mapping, Sequence

from .. import envs
from ..errors import AmpereError

_COLOURS = {"error": "31", "warning": "33", "hint": "36"}


class Console:
    """Where a command's output goes.

    Args:
        format: "table" for people, "json" for programs.
    """

    def __init__(self, format: str = "table"):
        self.format = format

    def text(self, line: str) -> None:
        """A line of data."""
        sys.stdout.write(line + "\n")

    def raw(self, content: bytes) -> None:
        """Data as it is."""
        sys.stdout.flush()
        sys.stdout.buffer.write(content)

    def document(self, value: Any) -> None:
        """Data as JSON."""
        self.text(json.dumps(value, indent=2))

    def table(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        """Rows as aligned columns under their headings; nothing if there are no rows.

        Args:
            rows: column name to value; lists are joined by commas.
            columns: those to show, in order.
        """
        cells = [[_cell(row[column]) for column in columns] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells)]
        for line in [list(columns), *cells] if cells else []:
            self.text("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip())

    def progress(self, message: str) -> None:
        """What is being done now."""
        self._stderr(message)

    def hint(self, message: str) -> None:
        """What to do next."""
        self._labelled("hint", message)

    def warning(self, message: str) -> None:
        """Something the user should know."""
        self._labelled("warning", message)

    def error(self, error: AmpereError) -> None:
        """A failure on one line, then its hint."""
        self._labelled("error", str(error))
        if error.hint:
            self.hint(error.hint)

    def _labelled(self, label: str, message: str) -> None:
        if sys.stderr.isatty() and envs.colour():
            label = f"\033[{_COLOURS[label]}m{label}\033[0m"
        self._stderr(f"{label}: {' '.join(message.split())}")

    def _stderr(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
