# SPDX-License-Identifier: Apache-2.0
"""Every op is declared in full, documented, and has its test file."""

import importlib
import inspect

import pytest

from tests.repo.checkout import ROOT
from vllm.ampere.kernels.registry import all_ops

# Sections of the docstring of a public function (design, section 3).
SECTIONS = ("Args:", "Returns:", "Numerics:", "Graph safety:", "Raises:", "Source:")


def public_function(op):
    module = importlib.import_module(op.reference.__module__)
    declaring = [m for m in map(importlib.import_module, _modules_beside(module)) if op in (getattr(m, "OP", None), *getattr(m, "OPS", ()))]
    assert len(declaring) == 1, f"{op.name} is declared in {declaring}"
    return getattr(declaring[0], op.name)


def _modules_beside(module):
    package = module.__name__.rpartition(".")[0]
    folder = ROOT.joinpath(*package.split("."))
    return [f"{package}.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_op_is_declared_in_full(op):
    function = public_function(op)
    documented = inspect.getdoc(function)
    assert [s for s in SECTIONS if s not in documented] == []
    for name in inspect.signature(function).parameters:
        assert name in documented, f"{name} is not described"
    written = {arg.name for arg in op.outputs} | set(op.mutates)
    assert written and set(op.tolerances) == written
    assert set(op.mutates) <= {arg.name for arg in op.inputs}
    assert op.summary.endswith(".") and op.source and op.axes
    assert op.cases and len({case.name for case in op.cases}) == len(op.cases)


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_reference_has_the_signature_of_the_op(op):
    assert op.reference.__name__ == f"{op.name}_ref"
    assert inspect.getdoc(op.reference)
    ours = [p for p in inspect.signature(public_function(op)).parameters if p != "implementation"]
    extra = [p for p in inspect.signature(op.reference).parameters if p not in ours]
    assert [p for p in inspect.signature(op.reference).parameters if p in ours] == ours
    assert set(extra) <= {"dtype"}


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_op_has_its_test_file(op):
    path = ROOT / "tests" / "kernels" / f"test_{op.name}.py"
    assert path.exists() or any(f"{op.name}(" in p.read_text() for p in (ROOT / "tests" / "kernels").glob("test_*.py"))


@pytest.mark.parametrize("op", all_ops().values(), ids=lambda op: op.name)
def test_cases_pass_the_contract_and_count_their_work(op):
    for case in op.cases:
        op.check(**{name: value for name, value in case.inputs().items() if name in {arg.name for arg in op.inputs}})
        assert op.bytes_moved(case.sizes) >= 0 and op.flops(case.sizes) >= 0
