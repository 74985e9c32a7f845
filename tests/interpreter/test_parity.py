# SPDX-License-Identifier: Apache-2.0
"""Every Triton implementation against the reference, on the cases that the interpreter gets through in seconds."""

import pytest

from vllm.ampere.kernels.registry import all_ops
from vllm.ampere.testing.parity import assert_parity, produce

TRITON = [(op, i) for op in all_ops().values() for i in op.implementations if i.name.startswith("triton")]


# Above, a case is left to the card: many programs that each do as the one before takes minutes here and shows nothing more.
WORK, TOKENS = 80_000_000, 1_000


def _small(op):
    """The cases of little work and few tokens, and always one that does some."""
    cost = {case.name: op.bytes_moved(case.sizes) + op.flops(case.sizes) for case in op.cases}
    least = min((c for c in cost.values() if c), default=0)
    return [case for case in op.cases if cost[case.name] <= max(WORK, least) and case.sizes.get("T", 0) <= TOKENS]


CASES = [(op, implementation, case) for op, implementation in TRITON for case in _small(op)]


@pytest.mark.parametrize("op, implementation, case", CASES, ids=[f"{o.name}-{i.name}-{c.name}" for o, i, c in CASES])
def test_equals_the_reference(op, implementation, case):
    got = produce(op, implementation.function, case.inputs(1))
    assert_parity(op, got, produce(op, op.reference, case.inputs(1)), f"{op.name} {case.name}")
