# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere plan`: which layouts fit a box of cards, what each card holds, and the arguments to serve with."""

import os
import shlex
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..errors import AmpereError, UsageError
from . import box
from .console import Console

if TYPE_CHECKING:
    from ..planner.inventory import Inventory
    from ..planner.memory import Serving
    from ..planner.plan import Layout, Plan, StagePlan
    from ..planner.splits import Best
    from ..planner.weights import WeightTable

_GIB = 2**30
# Columns of a list of layouts, and what each says.
COLUMNS = {
    "layout": "ranks of a tensor group x pipeline stages, +EP with whole experts on each rank",
    "layers": "of each stage",
    "weights": "GiB a card, stage by stage, as the engine holds them",
    "stored": "the same without Marlin's padding of the experts",
    "workspace": "GiB a card for buffers, activations, graphs, NCCL and CUDA",
    "free": "GiB a card that remain for the KV cache",
    "tokens": "in the KV cache, as vLLM prints them for the wanted context",
    "requests": "of the wanted context at once",
    "host": "GiB of pinned host memory, node by node",
    "cut": "bytes of one token from stage to stage",
    "relay": "layers at which a stage starts that needs a source's rows from the stage before",
    "step": "ms of a decode step of one request, estimated",
    "verdict": "ok, or why it is refused",
}


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser("plan", help="which layouts fit a box of cards", description=__doc__)
    parser.add_argument("--model", metavar="DIR", help="a checkpoint, read from its headers (default: the release)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--preset", metavar="NAME", help="a box, a layout and how to serve on it, by name")
    box.add_box_options(parser, choice)
    box.add_layout_options(parser)
    parser.add_argument("--all", action="store_true", help="every layout, with the reason where it is refused")
    choice.add_argument("--presets", action="store_true", help="every preset, planned")
    choice.add_argument("--splits", action="store_true", help="the best layers for each stage on common boxes of cards")
    choice.add_argument("--probe", action="store_true", help="time the links of this machine's cards; JSON for --inventory")
    box.add_node_options(parser)
    formats = ("table", "json", "args")
    parser.add_argument("--format", choices=formats, default="table", help="how to print (default: table)")
    parser.set_defaults(run=_run)


def _run(arguments: Namespace, console: Console) -> int:
    box.require_pydantic()
    from ..planner import presets, search
    from ..planner.plan import make_plan

    if console.format == "args" and (arguments.all or arguments.presets or arguments.splits or arguments.probe):
        raise UsageError("--format args prints one layout", "leave out --all, --presets, --splits and --probe")
    if arguments.probe:
        return _probe(arguments, console)
    if arguments.nodes or arguments.node_rank is not None or arguments.master_addr or arguments.interface:
        raise UsageError("--nodes, --node-rank, --master-addr and --interface go with --probe", "write --gpus 2x8x40")
    if arguments.presets:
        table = box.weight_table(arguments.model)
        changes = box.serving_changes(arguments)
        named = {name: presets.load(name) for name in presets.names()}
        plans = {
            name: make_plan(table, each.inventory, each.layout, each.serving.model_copy(update=changes))
            for name, each in named.items()
        }
        return _list(list(plans.values()), console, list(plans))
    if arguments.splits:
        return _splits(arguments, console)
    inventory, layout, serving = _asked(arguments)
    table = box.weight_table(arguments.model)
    if arguments.all:
        return _list(search.search(table, inventory, serving), console)
    plan = make_plan(table, inventory, layout, serving) if layout else search.search(table, inventory, serving)[0]
    return _one(table, plan, console)


def _probe(arguments: Namespace, console: Console) -> int:
    """Print this machine's box with its links as measured."""
    from ..planner import inventory, probe

    environment = dict(os.environ)
    try:
        cards = inventory.detect(environment.get("CUDA_VISIBLE_DEVICES"))
    except AmpereError as error:
        raise AmpereError(f"there is nothing to measure: {error}", "run it where the cards are") from error
    cards = cards.model_copy(update={"nodes": arguments.nodes or 1})
    node = box.this_node(arguments, cards.nodes, "the box", environment)
    console.progress(f"timing {cards.total} cards; nothing else should run on them")
    measured = probe.measure(cards, node)
    if node and node.rank:
        console.progress("measured; node 0 prints the figures")
    elif console.format == "json":
        console.document(measured.model_dump(mode="json", exclude_none=True))
    else:
        _show_links(measured, console)
    return 0


def _show_links(measured: "Inventory", console: Console) -> None:
    rows = [
        {"what": each.what, "over": each.link, "cards": each.cards, "bytes": f"{each.nbytes:,}", "us": f"{each.us:.1f}",
         "GB/s": f"{each.gb_s:.2f}"}
        for each in measured.samples
    ]
    console.table(rows, ("what", "over", "cards", "bytes", "us", "GB/s"))
    console.text("")
    links = [
        {"link": kind, "latency us": f"{link.latency_us:.2f}", "GB/s": f"{link.gb_s:.2f}"}
        for kind, link in measured.links.items()
    ]
    console.table(links, ("link", "latency us", "GB/s"))
    console.hint("write it with --format json to a file, and plan with --inventory FILE")


def _asked(arguments: Namespace) -> "tuple[Inventory, Layout | None, Serving]":
    """The box, the layout if one is named, and how to serve."""
    from ..planner import inventory, presets
    from ..planner.memory import Serving

    cards = box.named_box(arguments)
    layout, serving = None, Serving()
    if arguments.preset:
        preset = presets.load(arguments.preset)
        cards, layout, serving = preset.inventory, preset.layout, preset.serving
    cards = cards or inventory.detect(dict(os.environ).get("CUDA_VISIBLE_DEVICES"))
    layout = box.named_layout(arguments, cards) or layout
    return cards, layout, serving.model_copy(update=box.serving_changes(arguments))


def _list(plans: "list[Plan]", console: Console, names: list[str] | None = None) -> int:
    if console.format == "json":
        documents = [plan.document() for plan in plans]
        console.document(dict(zip(names, documents)) if names else documents)
    else:
        rows = [_row(plan) for plan in plans]
        for name, row in zip(names or (), rows):
            row["preset"] = name
        console.table(rows, (*["preset"] * bool(names), *COLUMNS))
        for title, meaning in COLUMNS.items():
            console.progress(f"{title}: {meaning}")
    return 0 if any(not plan.refusals for plan in plans) else 1


def _splits(arguments: Namespace, console: Console) -> int:
    """Print the best partitions of common boxes for each load, without a relay and with one where that is better."""
    from ..planner import splits

    serving = splits.SERVING.model_copy(update=box.serving_changes(arguments))
    rows: list[dict[str, Any]] = []
    for cards, plain, relayed in splits.common_boxes(box.weight_table(arguments.model), serving):
        for load in relayed.loads or ("any",):
            row = {"cards": cards.total, "GiB": cards.card_gib, "load": load}
            rows.append(row | {name: _split(best, load) for name, best in (("plain", plain), ("relayed", relayed))})
    if console.format == "json":
        console.document(rows)
        return 0
    for row in rows:
        if row["relayed"] == row["plain"] and "layout" in row["plain"]:
            row["relayed"] = {"layout": "the same"}
        for name in ("plain", "relayed"):
            found = row.pop(name)
            row[name] = found.get("layout") or f"lacks {found['missing_bytes'] / _GIB:.2f} GiB"
            row[f"{name} rate"] = f"{found['per_second']:,.0f}" if "per_second" in found else ""
            row[f"{name} tokens"] = f"{found['tokens']:,}" if "tokens" in found else ""
    console.table(rows, tuple(rows[0]))
    console.progress("plain: stages start only where the streams alone cross; relayed: anywhere")
    console.progress("rate: prompt tokens/s, or steps/s of requests, estimated; tokens: in the KV cache")
    return 0


def _split(best: "Best", load: str) -> dict[str, Any]:
    """JSON values of the best partition for a load, or what the nearest one lacks."""
    if load not in best.loads:
        return {"missing_bytes": round(best.missing_bytes)}
    split = best.loads[load]
    layout, tokens = split.plan.layout, split.plan.capacity_tokens
    return {"layout": f"{layout} {','.join(map(str, layout.partition))}", "per_second": split.per_second, "tokens": tokens}


def _row(plan: "Plan") -> dict[str, Any]:
    def by_stage(value) -> str:
        return " ".join(f"{value(stage) / _GIB:.1f}" for stage in plan.stages) or "-"

    return {
        "layout": str(plan.layout),
        "layers": ",".join(map(str, plan.layout.partition)),
        "weights": by_stage(lambda stage: stage.weights.total),
        "stored": by_stage(lambda stage: stage.weights.total - stage.weights.expert_padding),
        "workspace": by_stage(lambda stage: sum(stage.workspace.values())),
        "free": by_stage(lambda stage: stage.free_bytes),
        "tokens": f"{plan.capacity_tokens:,}" if plan.stages else "-",
        "requests": f"{plan.concurrency:.1f}" if plan.stages else "-",
        "host": " ".join(f"{pinned / _GIB:.0f}" for pinned in plan.host_bytes) or "-",
        "cut": " ".join(str(stage.crossing_bytes) for stage in plan.stages[:-1]) or "-",
        "relay": ",".join(str(stage.stage.start) for stage in plan.stages if stage.copied_layer is not None) or "-",
        "step": f"{plan.step.total:.1f}" if plan.step else "-",
        "verdict": _verdict(plan),
    }


def _verdict(plan: "Plan") -> str:
    if plan.missing_bytes:
        return f"lacks {plan.missing_bytes / _GIB:.2f} GiB a card"
    return "; ".join(plan.refusals or ("ok", *plan.warnings))


def _one(table: "WeightTable", plan: "Plan", console: Console) -> int:
    from ..planner.remedies import remedies

    if console.format == "json":
        console.document(plan.document())
    elif console.format == "args" and plan.refusals:
        pass
    elif console.format == "args":
        environment = [f"{name}={value}" for name, value in plan.environment().items()]
        console.text(" ".join([*environment, shlex.join(["vllm", "serve", "MODEL", *plan.arguments()])]))
    else:
        _show(plan, console)
    for line in plan.warnings:
        console.warning(line)
    for line in plan.refusals:
        console.error(AmpereError(line))
    if plan.missing_bytes:
        for line in remedies(table, plan):
            console.hint(line)
    elif plan.refusals:
        console.hint("see --all for the layouts that this box can run")
    return 1 if plan.refusals else 0


def _show(plan: "Plan", console: Console) -> None:
    layers = ",".join(map(str, plan.layout.partition))
    console.text(f"{plan.layout} on {plan.inventory.total} cards of {plan.inventory.card_gib:g} GiB, layers {layers}")
    if not plan.stages:
        return
    rows: list[dict[str, Any]] = []
    for title, value in _lines(plan.stages[0]):
        row = {"GiB a card": title}
        for number, stage in enumerate(plan.stages):
            row[f"stage {number}"] = value(stage)
        rows.append(row)
    console.table(rows, ("GiB a card", *(f"stage {number}" for number in range(len(plan.stages)))))
    step, context = plan.step, plan.serving.context
    pinned = zip(plan.host_bytes, plan.host_rounded_bytes)
    facts = {
        "KV cache": f"{plan.capacity_tokens:,} tokens, {plan.concurrency:.2f} requests of {context:,}; "
                    f"longest request {plan.longest_context:,}",
        "pinned on hosts": ", ".join(
            f"node {node}: {held / _GIB:.1f} GiB ({rounded / _GIB:.1f} without use_thp)"
            for node, (held, rounded) in enumerate(pinned)
        ),
        "decode step": f"{step.total:.1f} ms for one request: launches {step.launches:.1f}, "
                       f"weights {step.weights:.1f}, reductions {step.reductions:.2f}, hops {step.hops:.3f}",
        "a tensor group meets over": step.group or "one card",
    }
    console.table([{"what": what, "value": value} for what, value in facts.items()], ("what", "value"))


def _lines(first: "StagePlan"):
    """Title and value of each line of a stage's column."""
    def gib(value):
        return lambda stage: f"{value(stage) / _GIB:.2f}"

    yield "layers", lambda stage: f"{stage.stage.start}-{stage.stage.end - 1}"
    for name in vars(first.weights):
        yield name.replace("_", " "), gib(lambda stage, name=name: getattr(stage.weights, name))
    for name in first.workspace:
        yield f"for {name}", gib(lambda stage, name=name: stage.workspace[name])
    yield "free for KV", gib(lambda stage: stage.free_bytes)
    yield "bytes of a block", lambda stage: str(stage.block_bytes)
    yield "bytes of a token", lambda stage: f"{stage.token_bytes:g}"
    yield "keeps a copy of layer", lambda stage: "-" if stage.copied_layer is None else str(stage.copied_layer)
    yield "bytes of a token to the next stage", lambda stage: str(stage.crossing_bytes or "-")
