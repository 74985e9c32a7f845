# SPDX-License-Identifier: Apache-2.0
"""`make demo`: serve a tiny random DeepSeek-V4.1 on the CPU and stream one chat completion.

A launcher for a plain Python: it builds `.venv`, and everything that needs a package runs there, in
child processes. The server gets a session of its own, which is ended whatever ends the launcher.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator

if __package__:
    from . import environment
    from .errors import AmpereError
else:  # run as a script: its own folder is the first of sys.path
    import environment
    from errors import AmpereError

HOST = "127.0.0.1"
MODEL = "deepseek-v41-tiny"
FOLDER = environment.CACHE / "demo"
CHECKPOINT = FOLDER / "checkpoint"
SERVER_LOG = FOLDER / "server.log"
DISK_GIB = 1
MEMORY_GIB = 5
HEALTH_SECONDS = 300
ANSWER_SECONDS = 120
STOP_SECONDS = 15
QUESTION = "What is an Ampere?"
PR_SET_PDEATHSIG = 1

SERVER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "VLLM_AMPERE_PLATFORM": "cpu",
    "TRITON_INTERPRET": "1",  # the model runner's own small kernels
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # a spawned process imports PyTorch and vLLM again
    "VLLM_CACHE_ROOT": str(environment.CACHE / "vllm"),
    "TRITON_CACHE_DIR": str(environment.CACHE / "triton"),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def server_command(python: Path, port: int) -> list[str]:
    """The `vllm serve` of the demo: eager, engram tables in ordinary memory, five DSpark draft tokens."""
    arguments = {
        "--served-model-name": MODEL,
        "--host": HOST,
        "--port": str(port),
        "--max-model-len": "2048",
        "--max-num-seqs": "4",
        "--max-num-batched-tokens": "512",
        "--limit-mm-per-prompt": '{"image": 0}',
        "--engram-config": '{"cpu_offload": false}',
        "--speculative-config": '{"method": "dspark", "num_speculative_tokens": 5}',
    }
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(CHECKPOINT), "--enforce-eager"]
    return command + [word for pair in arguments.items() for word in pair]


def check_port(port: int) -> None:
    """Raises AmpereError when the server could not listen on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
            return
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        raise AmpereError(f"port {port} {reason}", f"take another one: make demo DEMO_PORT={probe.getsockname()[1]}")


class Server:
    """A server process with its descendants, its log, and its end.

    Args:
        command: what to run; it must answer GET /health with 200 on HOST:`port` once it is up.
        port: where it listens.
        log: file that its output goes to.
    """

    def __init__(self, command: list[str], port: int, log: Path):
        self.port = port
        self.log = log
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM_"))}
        libc = ctypes.CDLL(None)
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=environment.ROOT,
                env={**inherited, **SERVER_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )

    def phase(self) -> str:
        """What the server last said, without the prefix of its logger."""
        lines = self._lines()
        return re.sub(r"^.*?\[[\w.]+:\d+\] ", "", lines[-1]) if lines else ""

    def wait_healthy(self, seconds: float) -> None:
        """Return when it answers. Raises AmpereError when it ends first, or is not up in `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check_alive()
            connection = http.client.HTTPConnection(HOST, self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise AmpereError(f"the server was not up after {seconds:.0f} s: {self.phase()}", f"its log: {self.log}")

    def check_alive(self) -> None:
        """Raises AmpereError with the server's last error when it has ended."""
        if self.process.poll() is not None:
            raise AmpereError(
                f"the server ended (exit code {self.process.returncode}): {self.last_error()}", f"its log: {self.log}"
            )

    def last_error(self) -> str:
        """The newest line of the log that names an error and its cause, else its last line."""
        lines = self._lines()
        named = [m[1] for m in (re.search(r"(\b\w*(?:Error|Exception): .+)", line) for line in lines) if m]
        # vLLM ends with this one whatever went wrong in its child.
        causes = [line for line in named if "See root cause above" not in line]
        return (causes or named or lines or ["it said nothing"])[-1]

    def stop(self) -> None:
        """End the whole process group: SIGTERM, and SIGKILL to what is left."""
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5)):
            deadline = time.monotonic() + seconds
            if self._group_runs():
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
            while self._group_runs() and time.monotonic() < deadline:
                time.sleep(0.05)
        self.process.poll()

    def _group_runs(self) -> bool:
        """Whether a process of the group runs; a dead one that nobody has reaped does not."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, group, *_ = entry.read_text(errors="replace").rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(group) == self.process.pid and state != "Z":
                return True
        return False

    def _lines(self) -> list[str]:
        with self.log.open(errors="replace") as log:
            return [line.strip() for line in log if line.strip()]


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[Server]:
    """A server for the time of the body; nothing of it is left afterwards."""
    server = Server(command, port, log)
    try:
        yield server
    finally:
        ignored = {
            number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        server.stop()
        for number, handler in ignored.items():
            signal.signal(number, handler)


def stream_chat(port: int, question: str, max_tokens: int) -> Iterator[str]:
    """Yield the text of one streamed chat completion, piece by piece.

    Raises AmpereError when the server refuses it; OSError or HTTPException when the connection breaks.
    """
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise AmpereError(
                f"the server answered {response.status}: {response.read().decode(errors='replace')[:300]}",
                f"its log: {SERVER_LOG}",
            )
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            event = json.loads(data or "{}")
            if "error" in event:
                raise AmpereError(
                    f"the server stopped answering: {event['error']['message']}", f"its log: {SERVER_LOG}"
                )
            for choice in event.get("choices", ()):
                delta = choice["delta"]
                yield delta.get("reasoning") or delta.get("content") or ""
        raise ConnectionError("the answer broke off before its end")
    finally:
        connection.close()


def chat(server: Server) -> None:
    """Ask one question and print the answer as it comes."""
    print(f"\n> {QUESTION}\n(the weights are random, so the answer means nothing)\n", flush=True)
    start = time.monotonic()
    first = 0.0
    try:
        for piece in stream_chat(server.port, QUESTION, max_tokens=32):
            first = first or (time.monotonic() - start if piece else 0.0)
            print(piece, end="", flush=True)
    except (OSError, http.client.HTTPException) as error:
        time.sleep(1)  # let a dying server finish its log
        server.check_alive()
        raise AmpereError(f"the connection to the server broke: {error}", f"its log: {server.log}") from error
    if not first:
        raise AmpereError("the server answered without a token", f"its log: {server.log}")
    print(f"\n\nfirst token after {first:.1f} s, the whole answer after {time.monotonic() - start:.1f} s", flush=True)


def write_checkpoint(python: Path) -> None:
    """Write the tiny checkpoint with the environment's own Python, and without importing vLLM."""
    code = (
        "import vllm_ampere; vllm_ampere.load_overlay()\n"
        "from vllm.ampere.testing import tiny_checkpoint\n"
        f"tiny_checkpoint.write({str(CHECKPOINT)!r}, preset='demo')"
    )
    environment.call([python, "-c", code], "the checkpoint could not be written")


def demo(port: int, once: bool) -> None:
    """The whole demo. Raises AmpereError when the machine or the server does not allow it."""
    environment.check_python()
    check_port(port)
    environment.check_memory(MEMORY_GIB)
    cpu = environment.ENVIRONMENTS["cpu"]
    environment.build(["cpu"])
    environment.check_disk(environment.ROOT, DISK_GIB)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with environment.progress("tiny checkpoint"):
        write_checkpoint(cpu.python)
    with running(server_command(cpu.python, port), port, SERVER_LOG) as server:
        with environment.progress("vllm serve", server.phase):
            server.wait_healthy(HEALTH_SECONDS)
        chat(server)
        address = f"http://{HOST}:{port}"
        ask = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        print(f"served at {address} (log: {SERVER_LOG.relative_to(environment.ROOT)}); try it:")
        print(f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(ask)}'")
        if once:
            print("stopping the server")
            return
        print("Ctrl-C stops it", flush=True)
        try:
            while True:
                server.check_alive()
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("\nstopping the server")


def main() -> int:
    """Console entry of `make demo`; returns the exit code."""
    parser = argparse.ArgumentParser(description="Serve a tiny random DeepSeek-V4.1 on the CPU.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--once", action="store_true", help="stop after one answer, as without a terminal")
    arguments = parser.parse_args()
    once = arguments.once or not (sys.stdin.isatty() and sys.stdout.isatty())
    return environment.report("make demo", lambda: demo(arguments.port, once))


if __name__ == "__main__":
    sys.exit(main())
