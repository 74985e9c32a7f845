# SPDX-License-Identifier: Apache-2.0
"""Errors with the fix attached.

Every mistake that a user can make ends as one `AmpereError`: the command line prints its message on
one line, then its hint, and exits with `exit_code`; a traceback means a fault of ours.
"""


class AmpereError(Exception):
    """A failure that a user can act on.

    Args:
        message: one line that says what is wrong.
        hint: one line that says what to do about it; may be empty.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


class UsageError(AmpereError):
    """The command line itself is wrong."""

    exit_code = 2


class ContractError(AmpereError, ValueError):
    """An op was called with a tensor of the wrong dtype, shape, stride or device."""


class UnsupportedDeviceError(AmpereError):
    """The processor at hand cannot run this build."""


class SelectionError(AmpereError):
    """An implementation was asked for that does not exist or cannot run here."""


class PatchError(AmpereError):
    """The upstream tree cannot be patched, reverted or recognised."""


class CheckpointError(AmpereError):
    """The checkpoint is not a DeepSeek-V4.1 that can be loaded.

    Args:
        part: the part that is wrong, one of `checkpoint.PARTS`; empty where another than `inspect` raises.
    """

    def __init__(self, message: str, hint: str = "", part: str = ""):
        super().__init__(message, hint)
        self.part = part
