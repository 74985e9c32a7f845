# SPDX-License-Identifier: Apache-2.0
"""In what runs of `staged_engine.py` differ, bit by bit."""

import numpy as np


def drafted(run: dict) -> list:
    """(requests, digests of taps, drafts) of every step, from the stage with the draft; empty where nothing drafts."""
    return next((worker["drafts"] for worker in reversed(run["workers"]) if worker["drafts"]), [])


def in_step(step: tuple, other: tuple) -> set[str]:
    """In what two steps of `run["steps"]` differ, but for the names of requests."""
    (_, tokens, shown), (_, other_tokens, other_shown) = step, other
    found = {"tokens"} if tokens != other_tokens else set()
    if len(shown) != len(other_shown) or not all(map(np.array_equal, shown, other_shown)):
        found.add("log-probabilities")
    return found


def differences(seen: dict, want: dict) -> set[str]:
    """In what the steps of two runs differ, of which the first may go on longer: its last batches come back unread."""
    found = set().union(*map(in_step, seen["steps"], want["steps"]))
    if not 0 < len(want["steps"]) <= len(seen["steps"]) or len(drafted(want)) > len(drafted(seen)):
        found.add("steps")
    for (_, taps, drafts), (_, other_taps, other_drafts) in zip(drafted(seen), drafted(want)):
        if taps != other_taps:
            found.add("taps")
        # Whether a last step drafts at all depends on what the scheduler knows by then.
        if None not in (drafts, other_drafts) and drafts != other_drafts:
            found.add("drafts")
    return found
