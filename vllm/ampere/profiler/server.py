# SPDX-License-Identifier: Apache-2.0
"""A running server's profiler, over the routes that vLLM has where it was started with one."""

import time
import urllib.error
import urllib.request
from pathlib import Path

from ..errors import AmpereError
from .trace import find_traces

_ANSWER_S = 600  # stopping writes the traces
STARTED_WITH = """start it with --profiler-config '{"profiler": "torch", "torch_profiler_dir": "DIR"}'"""


def record(url: str, folder: Path, seconds: float) -> list[Path]:
    """Profile a server for some seconds; returns the traces that it left.

    Args:
        url: its address, as in http://127.0.0.1:8000.
        folder: its `torch_profiler_dir`, on this machine.
        seconds: how long.

    Raises:
        AmpereError: it does not answer, has no profiler, or left nothing in the folder.
    """
    if not folder.is_dir():
        raise AmpereError(f"there is no folder {folder}", f"{STARTED_WITH} and name DIR as --traces")
    before = {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    _post(f"{url.rstrip('/')}/start_profile")
    try:
        time.sleep(seconds)
    finally:
        _post(f"{url.rstrip('/')}/stop_profile")
    if not any(each.stat().st_mtime_ns != before.get(each) for each in folder.iterdir()):
        raise AmpereError(f"the server left no trace in {folder}", f"{STARTED_WITH} and name DIR as --traces")
    return [each for each in find_traces(folder) if each.stat().st_mtime_ns != before.get(each)]


def _post(address: str) -> None:
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="POST"), timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise AmpereError(f"the server has no profiler: {address} is not found", STARTED_WITH) from error
        raise AmpereError(f"{address} answered {error.code}", "the server's log says why") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise AmpereError(f"{address} does not answer: {reason}", "start the server, and name its address") from error
