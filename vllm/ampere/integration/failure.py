# SPDX-License-Identifier: Apache-2.0
"""A user's mistake ends the server with one line and a hint, not with a traceback."""

import functools
import sys

from ..errors import AmpereError


def exit_on_error(function):
    """Print an AmpereError on stderr and leave the process with its exit code."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except AmpereError as error:
            print(f"error: {error}", file=sys.stderr)
            if error.hint:
                print(f"hint: {error.hint}", file=sys.stderr)
            sys.stderr.flush()
            raise SystemExit(error.exit_code) from None

    return wrapped
