# SPDX-License-Identifier: Apache-2.0
"""Every code, from codes.toml: what it looks at, why it matters, the fix, and where it was learnt."""

import difflib
import functools
import operator
import tomllib
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError

# The digit after AMP.
AREAS = {1: "host", 2: "gpu", 3: "software", 4: "overlay", 5: "checkpoint", 6: "topology", 7: "logs"}
_FILE = Path(__file__).with_name("codes.toml")


@dataclass(frozen=True)
class Code:
    """One code.

    Attributes:
        code: AMP, the area's digit, two digits; never used again for another thing.
        title: what is looked at, a few words.
        why: what happens to a server otherwise.
        fix: what to do.
        source: public reports of docs/en/reports.md or write-ups where it was seen.
        patterns: what a line of a log holds that shows it, "..." standing for anything; of area 7 only.
        after, until: lines count from one that holds any of `after` to one that holds `until`; empty counts all.
        advice: the log shows what will hurt, not what stopped the server.
    """

    code: str
    title: str
    why: str
    fix: str
    source: str
    patterns: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    until: str = ""
    advice: bool = False

    @property
    def area(self) -> str:
        return AREAS[int(self.code[3])]


@functools.cache
def codes() -> dict[str, Code]:
    """All codes, in order."""
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {
        code: Code(code, **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
        for code, table in tables.items()
    }


def explain(code: str) -> Code:
    """The code as somebody typed it, in any case.

    Raises:
        UsageError: there is none; the hint has the nearest.
    """
    typed = code.upper()
    if found := codes().get(typed):
        return found
    near = difflib.get_close_matches(typed, codes(), n=len(codes()))
    # Of those that are as near as each other, the one with the most characters in their place.
    best = max(near, key=lambda each: sum(map(operator.eq, each, typed)), default=None)
    hint = f"did you mean {best}? " if best else ""
    raise UsageError(f"there is no code {code!r}", f"{hint}`vllm-ampere doctor` prints the codes it looks at")
