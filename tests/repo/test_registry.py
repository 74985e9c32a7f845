# SPDX-License-Identifier: Apache-2.0
"""Every file that declares an op has the test file of its name; `tests/kernels/test_declarations.py` does the rest."""

import ast

import pytest

from tests.repo.checkout import ROOT, modules, tree


def declares_ops(path) -> bool:
    targets = [t for node in tree(path).body if isinstance(node, ast.Assign) for t in node.targets]
    return "kernels" in path.parts and any(isinstance(t, ast.Name) and t.id in ("OP", "OPS") for t in targets)


@pytest.mark.parametrize("path", [*filter(declares_ops, modules())], ids=str)
def test_op_has_its_test_file(path):
    assert (ROOT / "tests" / "kernels" / f"test_{path.name}").exists()


def test_declarations_are_found():
    assert any(path.name == "inverse_rope.py" for path in modules() if declares_ops(path))
