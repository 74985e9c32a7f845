# SPDX-License-Identifier: Apache-2.0
"""Every Triton implementation against the reference, on the cheapest cases of its op."""

import pytest

from vllm.ampere.kernels.registry import all_ops
from vllm.ampere.testing.parity import assert_parity, produce

TRITON = [(op, i) for op in all_ops().values() for i in op.implementations if i.name == "triton"]


def _cheapest(op):
    """The empty case, where there is one, and the cheapest two that do work."""
    return sorted(op.cases, key=lambda case: op.bytes_moved(case.sizes) + op.flops(case.sizes))[:3]


CASES = [(op, implementation, case) for op, implementation in TRITON for case in _cheapest(op)]


@pytest.mark.parametrize("op, implementation, case", CASES, ids=[f"{o.name}-{c.name}" for o, _, c in CASES])
def test_equals_the_reference(op, implementation, case):
    got = produce(op, implementation.function, case.inputs(1))
    assert_parity(op, got, produce(op, op.reference, case.inputs(1)), f"{op.name} {case.name}")
