# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere doctor`: what would stop a server on this machine, or what stopped one, by code."""

from argparse import Namespace
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError
from .console import Console

if TYPE_CHECKING:
    from ..doctor.catalogue import Code
    from ..doctor.peer import Report


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser("doctor", help="what would stop a server here, or did", description=__doc__)
    parser.add_argument("--preset", metavar="NAME", help="what shall run here; compares its box with this machine")
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder, read from its headers")
    parser.add_argument("--peer", metavar="FILE", help="this command's JSON from another node, to compare with")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--log", metavar="FILE", help="look at a server's log instead of the machine")
    other.add_argument("--explain", metavar="CODE", help="what a code means, why it matters, and the fix")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="how to print (default: table)")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace, console: Console) -> int:
    from ..doctor import catalogue, logs, peer

    instead = "--log" if arguments.log else "--explain" if arguments.explain else ""
    asked = [f"--{name}" for name in ("preset", "model", "peer") if getattr(arguments, name)]
    if instead and asked:
        raise UsageError(f"{instead} looks at no machine, {asked[0]} does", f"leave {asked[0]} or {instead} out")
    if arguments.explain:
        return _explain(catalogue.explain(arguments.explain), console)
    if arguments.log:
        return _show(peer.Report(peer.SCHEMA, None, logs.read_log(Path(arguments.log))), console)
    return _machine(arguments, console)


def _machine(arguments: Namespace, console: Console) -> int:
    from ..doctor import peer
    from ..doctor.case import Case
    from ..doctor.run import examine
    from ..doctor.system import System

    other = peer.load(Path(arguments.peer)) if arguments.peer else None
    model = Path(arguments.model) if arguments.model else None
    case = Case.of(System(), arguments.preset, model, other)
    return _show(peer.Report(peer.SCHEMA, peer.facts(case), examine(case)), console)


def _explain(code: "Code", console: Console) -> int:
    if console.format == "json":
        console.document(asdict(code))
    else:
        console.text(f"{code.code}: {code.title}")
        for name in ("why", "fix", "source"):
            console.text(f"{name}: {getattr(code, name)}")
    return 0


def _show(report: "Report", console: Console) -> int:
    """Print its findings, one line each; returns the exit status."""
    from ..doctor.findings import Status

    findings = report.findings
    if console.format == "json":
        console.document(asdict(report))
    else:
        for finding in findings:
            fix = f" Fix: {finding.fix}" if finding.fix else ""
            console.text(f"{finding.status:4}  {finding.code}  {finding.title}: {finding.seen}.{fix}")
        counts = Counter(finding.status for finding in findings)
        console.progress(", ".join(f"{counts[status]} {status}" for status in Status if counts[status]))
        if set(counts) - {Status.OK}:
            console.hint("vllm-ampere doctor --explain CODE says why it matters and where it was seen")
    return 1 if any(finding.status is Status.FAIL for finding in findings) else 0
