# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere kernels`: the ops of this package, from their declarations."""

import difflib
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AmpereError, UsageError
from .console import Console

if TYPE_CHECKING:
    from ..kernels.contracts import Arg
    from ..kernels.registry import Op


def register(commands) -> None:
    """Add the command to a subparser collection."""
    parser = commands.add_parser("kernels", help="the ops and who implements them", description=__doc__)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    action = actions.add_parser("list", help="every op: its family, implementations and what it replaces")
    action.set_defaults(run=_list)
    explain = actions.add_parser("explain", help="one op: its contract, tolerances and implementations")
    explain.add_argument("op", metavar="OP", help="a name from `kernels list`")
    explain.set_defaults(run=_explain)
    compiled = actions.add_parser(
        "compile", help="compile every Triton kernel for sm_80 and sm_86: registers, shared memory, spills"
    )
    compiled.add_argument("--update", metavar="FILE", type=Path, help="write the table into a document, at its markers")
    compiled.set_defaults(run=_compile)
    for each in (action, explain, compiled):
        each.add_argument("--format", choices=("table", "json"), default="table", help="how to print (default: table)")


def _all_ops() -> "dict[str, Op]":
    try:
        from ..kernels import registry
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise AmpereError("the ops need PyTorch, which is not installed", "install vLLM, or PyTorch alone") from error
    return registry.all_ops()


def _list(arguments: Namespace, console: Console) -> int:
    rows = [_summary(op) for op in _all_ops().values()]
    if console.format == "json":
        console.document(rows)
    else:
        console.table(rows, ("name", "family", "implementations", "replaces", "summary"))
    return 0


def _explain(arguments: Namespace, console: Console) -> int:
    ops = _all_ops()
    op = ops.get(arguments.op)
    if op is None:
        near = difflib.get_close_matches(arguments.op, ops, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no op {arguments.op!r}", f"{meant}see `vllm-ampere kernels list`")
    described = _summary(op) | {
        "axes": dict(op.axes),
        "inputs": [_argument(arg) for arg in op.inputs],
        "outputs": [_argument(arg) for arg in op.outputs],
        "mutates": list(op.mutates),
        "tolerances": {
            name: {"relative_norm": bound.relative_norm, "worst": bound.worst} for name, bound in op.tolerances.items()
        },
        "cases": [case.name for case in op.cases],
        "source": f"model_spec section {op.source}" if op.source else "",
        "runs": _runs(op),
    }
    if console.format == "json":
        console.document(described)
        return 0
    console.text(f"{op.name}: {op.summary}")
    for name in ("family", "replaces", "source"):
        console.text(f"{name}: {described[name] or '-'}")
    sections = {
        "axes": ([{"axis": axis, "meaning": meaning} for axis, meaning in op.axes.items()], ("axis", "meaning")),
        "inputs": (described["inputs"], ("name", "dtypes", "shape", "note")),
        "outputs": (described["outputs"], ("name", "dtypes", "shape", "note")),
        "tolerances": (
            [{"of": name, **bounds} for name, bounds in described["tolerances"].items()],
            ("of", "relative_norm", "worst"),
        ),
        "implementations, best first": (described["runs"], ("implementation", "architectures", "here")),
    }
    for title, (rows, columns) in sections.items():
        if rows:
            console.text(f"\n{title}")
            console.table(rows, columns)
    return 0


def _compile(arguments: Namespace, console: Console) -> int:
    _all_ops()
    from ..kernels.launch import unavailable

    if reason := unavailable():
        raise AmpereError(reason, "pip install triton; a card is not needed")
    from ..testing import kernel_table

    document = _read(arguments.update) if arguments.update else ""
    if arguments.update:
        kernel_table.updated(document, "")  # a document without a place is refused now, not after minutes
    console.progress("compiling every kernel for sm_80 and sm_86: minutes")
    rows, compiled_by = kernel_table.rows(), kernel_table.compilers()
    if arguments.update:
        arguments.update.write_text(kernel_table.updated(document, kernel_table.markdown(rows, compiled_by)))
    elif console.format == "json":
        console.document({"compiled_by": compiled_by, "rows": rows})
    else:
        console.table(rows, (*kernel_table.IDENTITY, *kernel_table.MEASURED, "faults"))
    return int(any(row["faults"] for row in rows))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        why = error.strerror or error
        raise AmpereError(f"cannot read {path}: {why}", "name a document with the markers") from error


def _summary(op: "Op") -> dict:
    return {
        "name": op.name,
        "family": op.reference.__module__.split(".")[-2],
        "implementations": [implementation.name for implementation in op.implementations] + ["reference"],
        "replaces": op.replaces,
        "summary": op.summary,
    }


def _argument(arg: "Arg") -> dict:
    notes = ["may be None"] * arg.optional + [f"{arg.contiguous} contiguous"] * (arg.contiguous != "last")
    dtypes = [str(dtype).removeprefix("torch.") for dtype in arg.dtypes]
    return {"name": arg.name, "dtypes": dtypes, "shape": f"[{', '.join(arg.shape.split())}]", "note": ", ".join(notes)}


def _runs(op: "Op") -> list[dict]:
    runs = [
        {"implementation": i.name, "architectures": list(i.architectures), "here": i.requires() or "importable"}
        for i in op.implementations
    ]
    reference = {"implementation": "reference", "architectures": ["cpu"], "here": "importable; on a GPU only by name"}
    return [*runs, reference]
