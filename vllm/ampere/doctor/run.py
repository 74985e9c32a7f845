# SPDX-License-Identifier: Apache-2.0
"""Run every check of every area; none can take the others down."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from . import checkpoint, gpu, host, overlay, peer, software, topology
from .case import Case
from .catalogue import codes
from .findings import Finding, Status, Unknown
from .system import System

if TYPE_CHECKING:
    from .peer import Report

# Code to check, in the order they are printed. A check takes the case and returns its outcome, or None where
# nothing was asked that it could look at.
CHECKS = {
    code: check
    for area in (host, gpu, software, overlay, checkpoint, topology, peer)
    for code, check in area.CHECKS.items()
}


def run_checks(
    system: System,
    *,
    preset: str | None = None,
    model: str | os.PathLike | None = None,
    peer: "Report | None" = None,
) -> list[Finding]:
    """Look at everything.

    Args:
        system: the machine; `System()` is this one.
        preset: name of the preset that shall run on it; None checks what every layout needs.
        model: checkpoint folder; None leaves checkpoints out.
        peer: the report of another node of the same server.

    Returns:
        One finding for each check that applies. A check that cannot know, or fails itself, is "?" with the reason.

    Raises:
        UsageError: no preset has that name.
    """
    return examine(Case.of(system, preset, Path(model) if model is not None else None, peer))


def examine(case: Case) -> list[Finding]:
    """The same for a case."""
    found = (run_check(code, case) for code in CHECKS)
    return [finding for finding in found if finding]


def run_check(code: str, case: Case) -> Finding | None:
    """One of them."""
    entry = codes()[code]
    try:
        outcome = CHECKS[code](case)
    except Unknown as reason:
        return Finding(code, entry.title, Status.UNKNOWN, _line(reason))
    except Exception as error:
        return Finding(code, entry.title, Status.UNKNOWN, _line(f"the check failed: {type(error).__name__}: {error}"))
    if outcome is None:
        return None
    fix = "" if outcome.status is Status.OK else outcome.fix or entry.fix
    return Finding(code, entry.title, outcome.status, _line(outcome.seen), _line(fix))


def _line(text: object) -> str:
    # Paths and variables may hold bytes that are no text.
    return " ".join(str(text).encode(errors="replace").decode().split())
