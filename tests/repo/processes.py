# SPDX-License-Identifier: Apache-2.0
"""Whether processes have ended: a dead one that nobody has reaped counts as ended."""

import time
from pathlib import Path


def alive(group: int) -> list[int]:
    """Processes of a group that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(entry.name))
    return found


def gone(group: int, seconds: float = 10) -> bool:
    """Whether the group has ended, waiting for what a signal has begun."""
    deadline = time.monotonic() + seconds
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(group)


def ended(process: int, seconds: float = 10) -> bool:
    """Whether one process has ended, whatever became of its group."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False
