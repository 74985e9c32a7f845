# SPDX-License-Identifier: Apache-2.0
"""The table of docs/en/kernels.md: what every Triton kernel needs of an Ampere processor, from compiling it."""

import re
import subprocess
from collections.abc import Iterable, Mapping

from ..errors import AmpereError
from ..kernels.launch import Launch
from .compile_check import all_launches, build, faults, ptxas

ARCHITECTURES = ("sm80", "sm86")
# What a row is told apart by, and what depends on the compiler.
IDENTITY = ("kernel", "constants", "pointers", "warps")
MEASURED = ("registers", "shared bytes", "spilled bytes")
_BEGIN, _END = "<!-- kernels: begin, written by `make kernel-table` -->", "<!-- kernels: end -->"


def compilers() -> str:
    """The Triton release and the assembler that its wheel brings; a row's figures are theirs."""
    import triton

    report = subprocess.run([ptxas(), "--version"], capture_output=True, text=True, check=True).stdout
    return f"Triton {triton.__version__}, ptxas {re.search(r'release ([0-9.]+)', report)[1]}"


def identity(launch: Launch) -> dict:
    """The columns of a launch that no compiler decides."""
    types = (launch.signature.get(name, "") for name in launch.kernel.arg_names)
    pointers = (t.removesuffix(":16").removeprefix("*") for t in types if t.startswith("*"))
    constants = [f"{name}={value}" for name, value in launch.constexprs.items()]
    if launch.architectures != ARCHITECTURES:
        constants.append(f"({', '.join(launch.architectures)} only)")
    return {
        "kernel": launch.kernel.__name__.strip("_").removesuffix("_kernel"),
        "constants": " ".join(constants), "pointers": " ".join(pointers), "warps": str(launch.num_warps),
    }


def row(launch: Launch) -> dict:
    """`identity`, the figures of each architecture joined by a slash where they differ, and the faults found."""
    built = {architecture: build(launch, architecture) for architecture in launch.architectures}
    figures = {
        "registers": [b.registers for b in built.values()],
        "shared bytes": [b.shared_bytes for b in built.values()],
        "spilled bytes": [max(b.spill_store_bytes, b.spill_load_bytes) for b in built.values()],
    }
    found = [f"{a}: {fault}" for a, b in built.items() for fault in faults(launch, b, a)]
    joined = {name: " / ".join(map(str, dict.fromkeys(values))) for name, values in figures.items()}
    return identity(launch) | joined | {"faults": found}


def rows() -> list[dict]:
    """One row a launch that the compile tier builds; minutes."""
    return [row(launch) for launch in all_launches()]


def markdown(rows: Iterable[Mapping], compiled_by: str) -> str:
    """The text between the markers."""
    columns = (*IDENTITY, *MEASURED)
    lines = [f"Compiled with {compiled_by}.", "", f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row[column] for column in columns)} |" for row in rows)])


def updated(document: str, table: str) -> str:
    """The document with another table between its markers.

    Raises:
        AmpereError: it has no markers.
    """
    start, end = document.find(_BEGIN), document.find(_END)
    if start < 0 or end < start:
        raise AmpereError("the document has no place for the table", f"write {_BEGIN} and {_END} into it")
    return document[: start + len(_BEGIN)] + f"\n{table}\n" + document[end:]


def parsed(document: str) -> tuple[str, list[dict]]:
    """What compiled the document's table, and its rows."""
    block = document[document.index(_BEGIN) : document.index(_END)]
    compiled_by = re.search(r"^Compiled with (.*)\.$", block, re.M)[1]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in block.splitlines() if line.startswith("|")]
    return compiled_by, [dict(zip(cells[0], line)) for line in cells[2:]]
