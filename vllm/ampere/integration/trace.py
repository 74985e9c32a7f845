# SPDX-License-Identifier: Apache-2.0
"""Events for tests and debugging: JSON lines in the file named by `VLLM_AMPERE_TRACE`; nothing when unset."""

import json
import os

from .. import envs

PATH = envs.trace_path()


def emit(event: str, **fields) -> None:
    """Append one event. A line is one write below the pipe size, so processes do not mix their lines."""
    if PATH:
        line = json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n"
        with open(PATH, "a", buffering=1) as file:
            file.write(line)
