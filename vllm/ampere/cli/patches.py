# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere patches`: fetch the pinned vLLM, and put the series on a tree, take it off, or write it as one patch."""

import os
from argparse import Namespace
from pathlib import Path

from .. import upstream
from ..errors import AmpereError
from ..patching import series, tree
from .console import Console

_TREE_HELP = "folder that holds vllm/: unzipped wheel, source archive, git checkout (default: the installed vLLM)"


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser("patches", help="patch vLLM, or see whether it is patched", description=__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    action = actions.add_parser("status", help="say what each touched file is; exit 0 only if all are patched")
    _tree_options(action)
    action.set_defaults(run=_status)

    action = actions.add_parser("apply", help="patch the tree, all or nothing")
    _tree_options(action)
    action.add_argument("--overlay", action="store_true", help="copy vllm/ampere into the tree as well")
    action.set_defaults(run=_apply)

    action = actions.add_parser("revert", help="give the tree its original bytes back")
    _tree_options(action)
    action.add_argument("--overlay", action="store_true", help="remove vllm/ampere from the tree as well")
    action.set_defaults(run=_revert)

    action = actions.add_parser("export", help="write one patch for `git apply`: the series and vllm/ampere")
    action.add_argument("tree", nargs="?", metavar="TREE", help=_TREE_HELP)
    action.add_argument("--output", metavar="FILE", help="write there instead of to stdout")
    action.set_defaults(run=_export)

    action = actions.add_parser("fetch", help="bring the pinned vLLM by hash, with pip alone")
    action.add_argument("folder", nargs="?", metavar="DIR", help="where to unpack it (default: ./vllm-VERSION)")
    action.add_argument(
        "--sdist",
        action="store_true",
        help="the source archive, with csrc and tests, not the wheel; pip builds its metadata, "
        "so PyTorch for the CPU and build tools go into a temporary environment",
    )
    action.set_defaults(run=_fetch)

    action = actions.add_parser("refresh", help="for maintainers: regenerate hashes.json and README.md of the series")
    action.add_argument("tree", metavar="TREE", help="an unpatched tree of the pinned release")
    action.set_defaults(run=_refresh)


def _tree_options(action) -> None:
    action.add_argument("tree", nargs="?", metavar="TREE", help=_TREE_HELP)
    action.add_argument("--format", choices=("table", "json"), default="table", help="how to print (default: table)")


def _series() -> series.Series:
    return series.load(upstream.series_dir(), upstream.version())


def _status(arguments: Namespace, console: Console) -> int:
    patches = _series()
    root = tree.locate(arguments.tree)
    states = tree.survey(root, tree.series_changes(patches))
    state = tree.summary(root, states)
    rows = [{"file": file.change.path, "state": file.state, "patches": list(file.change.patches)} for file in states]
    if console.format == "json":
        console.document({"tree": str(root), "vllm": patches.version, "state": state, "files": rows})
    else:
        numbered = [row | {"patches": [name.partition("-")[0] for name in row["patches"]]} for row in rows]
        console.table(numbered, ("file", "state", "patches"))
        console.text(f"{state}: {len(patches.patches)} patches, {root}")
    if state == "interrupted":
        console.hint("an earlier run was killed: `patches apply` and `patches revert` roll it back before they start")
    elif error := tree.refusal(root, states, patches.version):
        console.hint(error.hint)
    elif state != "applied":
        console.hint("`vllm-ampere patches apply` patches it")
    return 0 if state == "applied" else 1


def _apply(arguments: Namespace, console: Console) -> int:
    return _move(arguments, console, tree.apply, ("applied", "already applied"))


def _revert(arguments: Namespace, console: Console) -> int:
    return _move(arguments, console, tree.revert, ("reverted", "not applied, nothing to revert"))


def _move(arguments: Namespace, console: Console, action, words: tuple[str, str]) -> int:
    patches = _series()
    root = tree.locate(arguments.tree)
    changes = tree.series_changes(patches)
    if arguments.overlay:
        tree.refuse_own_overlay(root)
        changes += tree.overlay_changes()
    changed, recovered = action(root, changes, patches.version)
    if recovered:
        console.warning("an earlier run had been killed half-way; it was rolled back first")
    state = words[0] if changed else words[1]
    if console.format == "json":
        console.document({"tree": str(root), "vllm": patches.version, "state": state, "changed": changed})
    else:
        console.text(f"{state}: {len(patches.patches)} patches, {len(changed)} files changed, {root}")
    return 0


def _export(arguments: Namespace, console: Console) -> int:
    content = tree.export(tree.locate(arguments.tree), _series())
    if arguments.output is None:
        console.raw(content)
        return 0
    path = Path(arguments.output)
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise AmpereError(f"cannot write {path}: {error.strerror}", "choose another --output") from error
    console.hint(f"in a checkout of vLLM {upstream.version()}: git apply {path}")
    return 0


def _fetch(arguments: Namespace, console: Console) -> int:
    folder = Path(arguments.folder or f"vllm-{upstream.version()}").absolute()
    if not upstream.fetch(folder, arguments.sdist, console.progress):
        console.progress("it was there already")
    console.text(str(folder))
    return 0


def _refresh(arguments: Namespace, console: Console) -> int:
    if not upstream.in_checkout():
        raise AmpereError("an installed series is not to be changed", "run this in a checkout of vllm-ampere")
    count = tree.refresh(tree.locate(arguments.tree), upstream.series_dir(), upstream.version())
    console.text(f"refreshed {upstream.series_dir()}: {count} patches")
    return 0
