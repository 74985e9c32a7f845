# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere serve`: check the machine, plan for its cards, and become `vllm serve` with what the plan says."""

import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Mapping

from .. import envs
from ..errors import AmpereError, UsageError
from ..patching import tree
from . import box
from .console import Console

if TYPE_CHECKING:
    from ..planner.inventory import Inventory
    from ..planner.plan import Plan
    from ..planner.presets import Preset
    from ..serving import Launch


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser(
        "serve",
        help="serve a checkpoint on this box",
        description=__doc__,
        usage="vllm-ampere serve MODEL [options] [-- arguments of vllm serve]",
        epilog="What stands after -- goes to `vllm serve` and wins over the plan, as in: serve DIR -- --port 9000",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of the checkpoint")
    parser.add_argument("--preset", metavar="NAME", help="a layout and how to serve on it (`plan --presets` lists them)")
    box.add_box_options(parser, parser.add_mutually_exclusive_group())
    box.add_layout_options(parser)
    box.add_node_options(parser)
    parser.add_argument("--skip-doctor", action="store_true", help="start without checking the machine")
    parser.add_argument("--dry-run", action="store_true", help="print the environment and the command, and stop")
    parser.add_argument("--format", choices=("table", "json"), default="table", help="of --dry-run (default: table)")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace, console: Console) -> int:
    box.require_pydantic()
    from ..planner import presets
    from ..serving import launch, node_count

    preset = presets.load(arguments.preset) if arguments.preset else None
    environment = dict(os.environ)
    if not arguments.dry_run:
        tree.locate(None)  # raises where there is no vLLM
        if not arguments.skip_doctor:
            _examine(arguments, console)
    plan = _plan(arguments, preset, environment, console)
    node = box.this_node(arguments, node_count(plan), str(plan.layout), environment)
    start = launch(plan, arguments.model, envs.cache_home(), arguments.given, environment, node)
    for line in [*plan.warnings, *start.warnings]:
        console.warning(line)
    if arguments.dry_run:
        _print(start, console)
        return 0
    console.progress(f"starting vllm serve: {plan.layout}, room for {plan.capacity_tokens:,} tokens")
    sys.stdout.flush()
    os.execve(start.command[0], start.command, start.applied(environment))


def _print(start: "Launch", console: Console) -> None:
    if console.format == "json":
        document = {"command": start.command, "environment": start.environment, "unset": list(start.removed)}
        console.document(document)
    else:
        console.text(start.shell())


def _examine(arguments: Namespace, console: Console) -> None:
    """Say what the doctor finds.

    Raises:
        AmpereError: a check failed.
    """
    from ..doctor import Status, System, run_checks

    console.progress("checking this machine")
    failed = []
    for finding in run_checks(System(), preset=arguments.preset, model=arguments.model):
        line = f"{finding.code} {finding.title}: {finding.seen}"
        if finding.status is Status.FAIL:
            failed.append(finding.code)
            console.error(AmpereError(line, finding.fix))
        elif finding.status is Status.WARN:
            console.warning(line)
            console.hint(finding.fix)
    if failed:
        hint = "mend that first (`vllm-ampere doctor --explain CODE` says more), or start with --skip-doctor"
        raise AmpereError(f"the doctor found what would stop the server: {', '.join(failed)}", hint)


def _plan(
    arguments: Namespace, preset: "Preset | None", environment: Mapping[str, str], console: Console
) -> "Plan":
    """The plan to serve: the named layout or the preset's, on the box at hand, or the best one there.

    Raises:
        AmpereError: it is refused.
    """
    from ..planner import search
    from ..planner.memory import Serving
    from ..planner.plan import make_plan
    from ..planner.remedies import remedies

    table = box.weight_table(arguments.model)
    cards = _cards(arguments, preset, environment, console)
    layout = box.named_layout(arguments, cards) or (preset and preset.layout)
    serving = preset.serving if preset else Serving()
    serving = serving.model_copy(update={"context": min(serving.context, table.spec.max_position_embeddings)})
    serving = serving.model_copy(update=box.serving_changes(arguments))
    plan = make_plan(table, cards, layout, serving) if layout else search.search(table, cards, serving)[0]
    if plan.refusals:
        gains = remedies(table, plan) if plan.missing_bytes else ["`vllm-ampere plan --all` lists what a box can run"]
        raise AmpereError("; ".join(plan.refusals), "; ".join(gains))
    return plan


def _cards(
    arguments: Namespace, preset: "Preset | None", environment: Mapping[str, str], console: Console
) -> "Inventory":
    """The box: the one that is named, else this machine's cards, else the preset's own."""
    from ..planner import inventory

    cards = box.named_box(arguments)
    if cards is None:
        try:
            cards = inventory.detect(environment.get("CUDA_VISIBLE_DEVICES"))
        except AmpereError as error:
            if preset is None:
                raise
            console.warning(f"{error}; planned for the box that the preset is made for")
            cards = preset.inventory
        else:
            nodes = arguments.nodes or (preset.inventory.nodes if preset else 1)
            cards = cards.model_copy(update={"nodes": nodes})
    if arguments.nodes not in (None, cards.nodes):
        raise UsageError(f"--nodes {arguments.nodes} contradicts a box of {cards.nodes}", "leave out one of the two")
    return cards
