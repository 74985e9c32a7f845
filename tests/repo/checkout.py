# SPDX-License-Identifier: Apache-2.0
"""What the tests of the repository read: its files, and the modules of the overlay as syntax trees."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OVERLAY = ROOT / "vllm" / "ampere"


@functools.cache
def files() -> list[Path]:
    """Files of the checkout that git tracks, or would: relative to its root."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return sorted(Path(name) for name in set(listed) if name and (ROOT / name).is_file())


def modules() -> list[Path]:
    """Python modules of the overlay, relative to the checkout."""
    return [path for path in files() if path.suffix == ".py" and path.parts[:2] == ("vllm", "ampere")]


@functools.cache
def tree(path: Path) -> ast.Module:
    """Syntax tree of a module named relative to the checkout."""
    return ast.parse((ROOT / path).read_text(), str(path))


def imported(path: Path) -> list[str]:
    """Dotted names that a module imports anywhere in it, relative ones resolved."""
    package = path.with_suffix("").parts[:-1]
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{stem}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names += [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return names
