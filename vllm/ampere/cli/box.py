# SPDX-License-Identifier: Apache-2.0
"""The options that `plan` and `serve` share: a checkpoint, a box of cards, a layout, and how to serve on it."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from .. import nodes
from ..errors import AmpereError, UsageError

if TYPE_CHECKING:
    from ..planner.inventory import Inventory
    from ..planner.plan import Layout
    from ..planner.weights import WeightTable

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def add_box_options(parser: ArgumentParser, box) -> None:
    """Add the options that name a box; `box` is `parser` or a group of it that excludes other choices."""
    box.add_argument("--gpus", metavar="8x80", help="cards x GiB, or nodes x cards x GiB (default: this machine's)")
    box.add_argument("--inventory", metavar="FILE", help="the box as JSON")
    parser.add_argument("--link", choices=("pcie", "nvlink"), help="what joins the cards of --gpus (default: pcie)")


def add_layout_options(parser: ArgumentParser) -> None:
    """Add the options that name a layout and how to serve on it."""
    parser.add_argument("--partition", metavar="20,20", help="one layout only: the layers of each pipeline stage")
    parser.add_argument("--expert-parallel", action="store_true", help="with --partition: whole experts on each card")
    parser.add_argument("--context", metavar="TOKENS", help="longest request, as 262144, 256K or 1M (default: 1M)")
    parser.add_argument("--batched-tokens", metavar="TOKENS", help="tokens of one step (default: 8192)")
    parser.add_argument("--requests", metavar="N", help="requests of one step (default: 32)")
    draft = parser.add_mutually_exclusive_group()
    draft.add_argument("--draft-tokens", metavar="N", help="tokens that DSpark drafts a step (default: 5)")
    draft.add_argument("--no-draft", action="store_true", help="without DSpark")
    parser.add_argument("--no-images", action="store_true", help="without the vision tower")


def add_node_options(parser: ArgumentParser) -> None:
    """Add the options that say which of several nodes this machine is."""
    parser.add_argument("--nodes", type=_count, metavar="N", help="this machine is one of N alike (default: 1, or as planned)")
    parser.add_argument("--node-rank", type=int, metavar="R", help="number of this node, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="address of node 0, as the other nodes reach it")
    parser.add_argument("--interface", metavar="NAME", help="network interface between nodes (default: towards node 0)")


def this_node(arguments: Namespace, count: int, what: str, environment: Mapping[str, str]) -> nodes.Node | None:
    """This machine as one of `count` nodes; None if `what` takes one only.

    Raises:
        UsageError: the options of nodes are missing, useless or out of range.
        AmpereError: the nodes could not meet.
    """
    rank, master = arguments.node_rank, arguments.master_addr
    if count == 1:
        if rank is not None or master or arguments.interface:
            raise UsageError(
                f"{what} takes one node: --node-rank, --master-addr and --interface have no use",
                "say that there are more: --nodes 2",
            )
        return None
    if rank is None or not master:
        raise UsageError(
            f"{what} takes {count} nodes: --node-rank and --master-addr are needed",
            "run the same command on each, with --node-rank 0 on the node of --master-addr and 1 on the next",
        )
    if not 0 <= rank < count:
        raise UsageError(f"--node-rank {rank} is not one of {count} nodes", f"they count from 0 to {count - 1}")
    name = arguments.interface or environment.get("GLOO_SOCKET_IFNAME")
    interface = nodes.named(name) if name else nodes.towards(master, rank)
    return nodes.Node(rank, count, master, interface)


def require_pydantic() -> None:
    """Raises AmpereError where the planner's one dependency is missing."""
    try:
        import pydantic  # noqa: F401
    except ImportError as error:
        hint = "install vLLM, which brings it, or pydantic alone"
        raise AmpereError("the planner needs the package pydantic, which is not installed", hint) from error


def weight_table(model: str | None) -> "WeightTable":
    """The weights of a checkpoint's folder, from its headers; of the release if None.

    Raises:
        CheckpointError: `model` is no complete DeepSeek-V4.1.
    """
    from ..planner.weights import WeightTable

    if model is None:
        from ..model_spec import ModelSpec

        return WeightTable(ModelSpec())
    from ..checkpoint import inspect

    report = inspect(model)
    return WeightTable(report.spec, (stored.spec for stored in report.tensors.values()))


def named_box(arguments: Namespace) -> "Inventory | None":
    """The box of --inventory or --gpus; None if neither is given."""
    from ..planner import inventory

    if arguments.link and not arguments.gpus:
        raise UsageError("--link goes with --gpus", "write --gpus 8x80 --link nvlink")
    if arguments.inventory:
        return inventory.load(Path(arguments.inventory))
    return inventory.parse(arguments.gpus, arguments.link or "pcie") if arguments.gpus else None


def named_layout(arguments: Namespace, box: "Inventory") -> "Layout | None":
    """The layout of --partition and --expert-parallel on a box; None if neither is given."""
    from ..planner.plan import Layout

    if not arguments.partition:
        if arguments.expert_parallel:
            raise UsageError("--expert-parallel goes with --partition", "write --partition 20,20 --expert-parallel")
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.partition):
        hint = "write the layers of each stage: 20,20"
        raise UsageError(f"--partition {arguments.partition!r} is no list of layers", hint)
    partition = tuple(map(int, arguments.partition.split(",")))
    if box.total % len(partition):
        raise UsageError(
            f"{box.total} cards cannot be dealt out over {len(partition)} stages", "the stages must divide the cards"
        )
    return Layout(tensor=box.total // len(partition), partition=partition, expert_parallel=arguments.expert_parallel)


def serving_changes(arguments: Namespace) -> dict[str, Any]:
    """Fields of `Serving` that the command line sets."""
    names = ("context", "batched_tokens", "requests", "draft_tokens")
    asked = {name: getattr(arguments, name) for name in names}
    update: dict[str, Any] = {name: _tokens(name, word) for name, word in asked.items() if word is not None}
    if arguments.no_draft:
        update["draft_tokens"] = 0
    if arguments.no_images:
        update["images"] = False
    return update


def _count(word: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", word):
        raise ArgumentTypeError(f"{word!r} is no count")
    return int(word)


def _tokens(name: str, word: str) -> int:
    match = re.fullmatch(r"([1-9]\d*)([KM]?)", word.upper())
    if not match:
        raise UsageError(f"--{name.replace('_', '-')} {word!r} is no count", "write 262144, 256K or 1M")
    return int(match[1]) * _UNITS[match[2]]
