# SPDX-License-Identifier: Apache-2.0
"""Compiled Triton kernels against the reference, on each op's smallest case."""

import pytest

from vllm.ampere.kernels.registry import all_ops
from vllm.ampere.testing.parity import assert_parity, produce


def _smallest(op):
    """The case of least work that does some."""
    work = {case.name: op.bytes_moved(case.sizes) + op.flops(case.sizes) for case in op.cases}
    return min((case for case in op.cases if work[case.name]), key=lambda case: work[case.name])


CASES = [(op, i, _smallest(op)) for op in all_ops().values() for i in op.implementations if i.name.startswith("triton")]


@pytest.mark.parametrize("op, implementation, case", CASES, ids=[f"{o.name}-{i.name}-{c.name}" for o, i, c in CASES])
def test_equals_the_reference(op, implementation, case):
    got = produce(op, implementation.function, case.inputs(1))
    assert_parity(op, got, produce(op, op.reference, case.inputs(1)), f"{op.name} {case.name}")
