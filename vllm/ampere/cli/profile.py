# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere profile`: where a step's time goes, stage by stage, of a trace, a server or an engine of its own."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import AmpereError, UsageError
from ..patching import tree
from .console import Console

if TYPE_CHECKING:
    from ..profiler import Summary

_COLUMNS = ("stage", "calls", "total ms", "average us", "share", "ms per step")
_SCHEMA = 1


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser(
        "profile",
        help="where a step's time goes, stage by stage",
        description=__doc__,
        usage="vllm-ampere profile (TRACE | --server URL --traces DIR | --model DIR) [options] [-- engine arguments]",
        epilog="What stands after -- goes to the engine of --model, as in: profile --model DIR -- --max-model-len 4096",
    )
    parser.add_argument("trace", metavar="TRACE", nargs="?", type=Path, help="a trace, or a folder of one run's traces")
    parser.add_argument("--server", metavar="URL", help="a running server, started with --profiler-config")
    parser.add_argument("--traces", metavar="DIR", type=Path, help="its torch_profiler_dir; --model: keep them here")
    parser.add_argument("--seconds", type=_positive(float), default=5.0, help="how long to watch a server (default: 5)")
    parser.add_argument("--model", metavar="DIR", type=Path, help="start an engine for this checkpoint and profile it")
    parser.add_argument("--steps", type=_positive(int), default=20, help="decode steps of --model (default: 20)")
    parser.add_argument("--requests", type=_positive(int), default=1, help="requests at once (default: 1)")
    parser.add_argument("--context", type=_positive(int), default=256, help="tokens of each prompt (default: 256)")
    parser.add_argument("--stacks", action="store_true", help="record Python frames: more stages, slower host")
    parser.add_argument("--output", metavar="FILE", type=Path, help="also write the document of --format json here")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="how to print (default: table)")
    parser.set_defaults(run=_run)


def _positive(kind: type):
    def parse(text: str):
        try:
            number = kind(text)
        except ValueError:
            number = 0
        if not 0 < number < math.inf:
            raise ArgumentTypeError(f"{text!r} is not a number above 0")
        return number

    return parse


def _run(arguments: Namespace, console: Console) -> int:
    from .. import profiler

    if sum(source is not None for source in (arguments.trace, arguments.server, arguments.model)) != 1:
        raise UsageError("name one of TRACE, --server and --model", "see `vllm-ampere profile --help`")
    if arguments.given and not arguments.model:
        raise UsageError("arguments after -- are for the engine of --model", "see `vllm-ampere profile --help`")
    if arguments.trace:
        summaries = profiler.read(profiler.find_traces(arguments.trace))
    elif arguments.server:
        if not arguments.traces:
            raise UsageError("--server needs --traces", "the server's torch_profiler_dir, on this machine")
        from ..profiler import server

        console.progress(f"watching {arguments.server} for {arguments.seconds:g} s")
        summaries = profiler.read(server.record(arguments.server, arguments.traces, arguments.seconds))
    else:
        summaries = _offline(arguments, console)
    document = {
        "schema": _SCHEMA, "kind": "profile", "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "vllm_ampere": __version__, "traces": [asdict(summary) for summary in summaries],
    }  # fmt: skip
    if arguments.output:
        try:
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            why = error.strerror or error
            raise AmpereError(f"cannot write {arguments.output}: {why}", "name another file") from error
    if console.format == "json":
        console.document(document)
    else:
        for summary in summaries:
            _print(summary, console)
    return 0


def _print(summary: "Summary", console: Console) -> None:
    steps = f"{summary.steps} steps" if summary.steps else "no step marked"
    console.text(f"{summary.trace}: {summary.device}, {steps}, {summary.window_ms:.3f} ms, "
                 f"{summary.overlap_ms:.3f} ms beside other kernels")  # fmt: skip

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    console.table([
        dict(zip(_COLUMNS, (row["stage"], row["calls"] or "-", number(row["total_ms"], 3), number(row["average_us"], 1),
                            f"{row['share']:.1%}", number(row["per_step_ms"], 3))))
        for row in summary.rows
    ], _COLUMNS)  # fmt: skip
    if summary.others:
        console.text("\nlongest of other")
        rows = [{"kernel": each["name"][:90], "calls": each["calls"], "total ms": f"{each['total_ms']:.3f}"}
                for each in summary.others]  # fmt: skip
        console.table(rows, ("kernel", "calls", "total ms"))
    console.text("")


def _offline(arguments: Namespace, console: Console) -> "list[Summary]":
    """Profile an engine of its own, in a process that may import vLLM."""
    from .. import profiler

    if not (arguments.model / "config.json").is_file():
        raise AmpereError(f"{arguments.model} holds no config.json", "name the folder of a checkpoint")
    tree.locate(None)  # raises where there is no vLLM
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.traces or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "engine.log"
        job = {
            "model": str(arguments.model), "folder": str(folder), "steps": arguments.steps, "stacks": arguments.stacks,
            "requests": arguments.requests, "context": arguments.context, "arguments": arguments.given,
        }  # fmt: skip
        console.progress("starting an engine: minutes for the released checkpoint")
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with open(log, "w") as stream:
            command = [sys.executable, "-m", "vllm.ampere.integration.profile_job", json.dumps(job)]
            status = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment).returncode
        if status:
            raise _failure(status, log.read_text(errors="replace").strip().splitlines())
        return profiler.read(profiler.find_traces(folder))


def _failure(status: int, lines: list[str]) -> AmpereError:
    """What an engine died of, by the last line of its log that names an error, with the hint behind it."""
    errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception): |.*\berror: ", line)]
    cause = lines[errors[-1]] if errors else lines[-1] if lines else "it said nothing"
    hints = [line.removeprefix("hint: ") for line in lines[errors[-1] :] if line.startswith("hint: ")] if errors else []
    hint = hints[0] if hints else "--traces DIR keeps its log, engine.log"
    return AmpereError(f"the engine ended with {status}: {cause}", hint)
