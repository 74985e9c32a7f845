# SPDX-License-Identifier: Apache-2.0
"""An engine of `staged_engine.py` that is kept running and called from here."""

import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from vllm.ampere.testing.engine import environment, stop

SCRIPT = Path(__file__).with_name("staged_engine.py")


class KeptEngine:
    """Starts the engine at once; the first call waits for it. A context manager that stops it.

    Args:
        folder: takes `NAME.json`, `NAME.log` and `NAME.trace`.
        name: what the files are called.
        job: `checkpoint`, `options` and `sampling` as `staged_engine.py` has them.
        env: variables on top of `environment()`.
        limit_s: the most seconds of the start, and of one call.

    Raises:
        RuntimeError: from a call: the engine ended or did not answer in time; the message holds the end of its log.
    """

    def __init__(self, folder: Path, name: str, job: Mapping, env: Mapping[str, str], limit_s: float = 600.0):
        self.name, self._limit_s = name, limit_s
        self.log, self.trace = folder / f"{name}.log", folder / f"{name}.trace"
        described = folder / f"{name}.json"
        described.write_text(json.dumps(job))
        self.trace.touch()
        self._calls, theirs = multiprocessing.Pipe()
        env = environment(**env, VLLM_AMPERE_TRACE=str(self.trace))
        with theirs, open(self.log, "wb") as sink:
            self._child = subprocess.Popen([sys.executable, str(SCRIPT), str(described), str(theirs.fileno())],
                                           stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=env,
                                           pass_fds=[theirs.fileno()], start_new_session=True)
        self._stages = None

    def __enter__(self) -> "KeptEngine":
        return self

    def __exit__(self, *_) -> None:
        self._calls.close()
        stop(self._child)

    @property
    def stages(self) -> list[dict]:
        """`StageRecorder.record_stage` of every worker, once the engine runs."""
        if self._stages is None:
            self._stages = self._answer()
        return self._stages

    def call(self, method: str, *arguments):
        """What a method of `Recorded` returns there."""
        assert self.stages
        self._calls.send((method, arguments))
        return self._answer()

    def _answer(self):
        end = time.monotonic() + self._limit_s
        try:
            while not self._calls.poll(1.0):
                if self._child.poll() is not None:
                    raise EOFError
                if time.monotonic() > end:
                    raise RuntimeError(f"{self.name} did not answer within {self._limit_s:.0f} s:\n{self._tail()}")
            return self._calls.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self.name} ended:\n{self._tail()}") from None

    def events(self, kind: str) -> list[dict]:
        """Trace events of one kind so far, from every process of the engine."""
        found = (json.loads(line) for line in self.trace.read_text().splitlines())
        return [event for event in found if event["event"] == kind]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]
