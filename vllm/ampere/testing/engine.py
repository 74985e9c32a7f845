# SPDX-License-Identifier: Apache-2.0
"""The patched engine as a child process: `vllm serve` and Python scripts, for tests that compare its output.

Nothing here imports vLLM: this module starts processes, talks HTTP to them and stops them. Every child gets a
session of its own, so that stopping it also stops the engine and worker processes below it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..serving import STARTED_BY

# What a machine with no GPU needs, beside the platform that the package installs.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    **STARTED_BY,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

# Engine arguments of every tiny run, as keywords of `vllm.LLM`; `arguments` turns them into flags.
OPTIONS = {
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 512,
    "max_logprobs": -1,
    "limit_mm_per_prompt": {"image": 0},
    "engram_config": {"cpu_offload": False},
}


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with `ENVIRONMENT` and then `extra` on top; its Python comes first on PATH."""
    ours = dict(os.environ)
    path = os.pathsep.join([str(Path(sys.executable).parent), ours.get("PATH", "")])
    return {**ours, **ENVIRONMENT, "PATH": path, **extra}


def arguments(options: Mapping) -> list[str]:
    """Flags of `vllm serve` for engine keywords: True is a bare flag, False its --no- form, a dict is JSON."""
    flags = []
    for name, value in options.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(child: subprocess.Popen, grace_s: float = 30.0) -> None:
    """End a child of ours and its session: SIGTERM, then SIGKILL to what is left after `grace_s` seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


@dataclass(frozen=True)
class Exit:
    """How a child ended.

    Attributes:
        code: its exit status; None if it was still running at the limit and was stopped.
        output: stdout and stderr together.
        seconds: how long it ran.
    """

    code: int | None
    output: str
    seconds: float


def run(command: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str] | None = None) -> Exit:
    """Run `python <command>` in the engine's environment to its end, or to `limit_s` seconds.

    Args:
        command: arguments of this Python.
        log: file that takes stdout and stderr.
        limit_s: the child and its session are stopped after this many seconds.
        env: variables on top of `environment()`.
    """
    start = time.monotonic()
    with open(log, "wb") as sink:
        child = subprocess.Popen([sys.executable, *command], stdout=sink, stderr=subprocess.STDOUT,
                                 stdin=subprocess.DEVNULL, env=environment(**(env or {})), start_new_session=True)
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(child)
    return Exit(code, Path(log).read_text(errors="replace"), time.monotonic() - start)


@dataclass(frozen=True)
class Completion:
    """One answer of the completions endpoint.

    Attributes:
        tokens: generated token ids.
        logprobs: float32 [generated tokens, vocabulary], or None if not asked for.
        prompt_logprobs: float32 [prompt tokens - 1]: of each prompt token after the first, given those before it;
            None if not asked for.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    tokens: list[int]
    logprobs: torch.Tensor | None
    prompt_logprobs: torch.Tensor | None
    cached_tokens: int


class Server:
    """`vllm serve` of one checkpoint on a free port; a context manager that returns once the server is healthy.

    Args:
        checkpoint: folder of the checkpoint.
        folder: takes the log (`server.log`) and the trace (`trace.jsonl`).
        options: engine keywords on top of `OPTIONS`; a value of None drops one.
        env: variables on top of `environment()`.
        limit_s: the most seconds to healthy.

    Attributes:
        base_url: "http://127.0.0.1:<port>".
        log, trace: the two files; `VLLM_AMPERE_TRACE` names the second in every engine process.
        startup_s: seconds from start to healthy.

    Raises:
        RuntimeError: the server ended or was not healthy in time; the message holds the end of its log.
    """

    def __init__(self, checkpoint: Path, folder: Path, options: Mapping | None = None,
                 env: Mapping[str, str] | None = None, limit_s: float = 300.0):
        self.log, self.trace = Path(folder) / "server.log", Path(folder) / "trace.jsonl"
        self._options = {k: v for k, v in (OPTIONS | dict(options or {})).items() if v is not None}
        self._env = {"VLLM_AMPERE_TRACE": str(self.trace), **(env or {})}
        self._checkpoint, self._limit_s = Path(checkpoint), limit_s
        self.startup_s = 0.0

    def __enter__(self) -> "Server":
        start = time.monotonic()
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        command = self._command(self._options | {"host": "127.0.0.1", "port": port})
        with open(self.log, "wb") as sink:
            self._child = subprocess.Popen([sys.executable, *command], stdout=sink, stderr=subprocess.STDOUT,
                                           stdin=subprocess.DEVNULL, env=environment(**self._env), start_new_session=True)
        try:
            while not self._healthy():
                if self._child.poll() is not None:
                    raise RuntimeError(f"vllm serve ended with {self._child.returncode}:\n{self._tail()}")
                if time.monotonic() - start > self._limit_s:
                    raise RuntimeError(f"vllm serve was not healthy after {self._limit_s:.0f} s:\n{self._tail()}")
                time.sleep(0.25)
        except BaseException:
            stop(self._child)
            raise
        self.startup_s = time.monotonic() - start
        return self

    def __exit__(self, *_) -> None:
        stop(self._child)

    def _command(self, options: Mapping) -> list[str]:
        return serve_command(self._checkpoint, options)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self.base_url + "/health", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def post(self, path: str, body: Mapping, limit_s: float = 600.0,
             headers: Mapping[str, str] | None = None) -> tuple[int, dict]:
        """HTTP status and JSON of a POST; an error status is returned, not raised."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.base_url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def complete(self, prompt: Sequence[int], max_tokens: int = 8, logprobs: bool = True,
                 prompt_logprobs: bool = False) -> Completion:
        """Greedy completion of token ids, through `/v1/completions`, past any end-of-sequence token.

        Args:
            prompt: token ids.
            max_tokens: tokens to generate.
            logprobs: return the whole vocabulary's log-probabilities of each generated token.
            prompt_logprobs: return those of the prompt's tokens (the engine then computes every prompt row).
        """
        body = {"model": str(self._checkpoint), "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
                "logprobs": -1 if logprobs else None, "prompt_logprobs": 0 if prompt_logprobs else None}
        status, answer = self.post("/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"HTTP {status}: {answer}\n{self._tail()}")
        choice = answer["choices"][0]
        rows = [by_token(row) for row in choice["logprobs"]["top_logprobs"]] if logprobs else None
        given = choice["prompt_logprobs"][1:] if prompt_logprobs else None
        return Completion(
            choice["token_ids"],
            torch.stack(rows) if rows else None,
            torch.tensor([row[str(token)]["logprob"] for row, token in zip(given, prompt[1:])]) if given else None,
            (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    def metric(self, name: str, missing: float | None = None) -> float:
        """Sum over labels of a Prometheus counter, e.g. "vllm:prefix_cache_hits_total".

        Raises:
            KeyError: there is no such counter, and no value to give for a missing one.
        """
        with urllib.request.urlopen(self.base_url + "/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))]
        if not values and missing is None:
            raise KeyError(f"/metrics has no {name}")
        return sum(values) if values else missing

    def events(self, kind: str) -> list[dict]:
        """Trace events of one kind so far, from every engine process."""
        if not self.trace.exists():
            return []
        found = (json.loads(line) for line in self.trace.read_text().splitlines())
        return [event for event in found if event["event"] == kind]


def serve_command(checkpoint: Path, options: Mapping) -> list[str]:
    """Arguments of this Python that start `vllm serve`."""
    return ["-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *arguments(options)]


def by_token(row: Mapping[str, float]) -> torch.Tensor:
    """float32 [vocabulary] from a mapping with the keys "token_id:<n>", one for every token."""
    out = torch.full((len(row),), torch.nan)
    for key, value in row.items():
        out[int(key.removeprefix("token_id:"))] = value
    return out
