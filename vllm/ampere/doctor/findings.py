# SPDX-License-Identifier: Apache-2.0
"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The outcome of a check; the value is what is printed."""

    OK = "ok"
    FAIL = "FAIL"
    WARN = "warn"
    UNKNOWN = "?"


@dataclass(frozen=True)
class Outcome:
    """What a check returns.

    Attributes:
        status: a check that cannot know raises `Unknown` instead of returning UNKNOWN.
        seen: what was seen, in one line.
        fix: what to do here; empty takes the code's own.
    """

    status: Status
    seen: str
    fix: str = ""


class Unknown(Exception):
    """A check cannot know; the text says why."""


def ok(seen: str) -> Outcome:
    """All is well."""
    return Outcome(Status.OK, seen)


def warn(seen: str, fix: str = "") -> Outcome:
    """It runs, and will hurt."""
    return Outcome(Status.WARN, seen, fix)


def fail(seen: str, fix: str = "") -> Outcome:
    """It will not run."""
    return Outcome(Status.FAIL, seen, fix)


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        code: as AMP101; `codes.toml` has all.
        title: what is looked at, a few words.
        status: ok, FAIL, warn or ?.
        seen: what was seen, or why nothing was, in one line.
        fix: what to do, in one line; empty where all is well.
    """

    __pydantic_config__ = {"extra": "forbid"}

    code: str
    title: str
    status: Status
    seen: str
    fix: str = ""
