# SPDX-License-Identifier: Apache-2.0
"""Every implementation of every op against the reference on the CPU, on all of the op's cases."""

import pytest
import torch

from vllm.ampere import arch
from vllm.ampere.testing.parity import assert_parity, assert_same_bits, implemented_cases, produce

pytestmark = pytest.mark.gpu
CASES = implemented_cases()
IDS = [f"{op.name}-{implementation.name}-{case.name}" for op, implementation, case in CASES]
each_case = pytest.mark.parametrize("op, implementation, case", CASES, ids=IDS)


def _serves(implementation) -> None:
    here = arch.of_device("cuda").name
    if here not in implementation.architectures:
        pytest.skip(f"{implementation.name} does not serve {here}")
    if reason := implementation.requires():
        pytest.skip(reason)


@each_case
@pytest.mark.parametrize("seed", [1, 2])
def test_equals_the_reference(op, implementation, case, seed):
    _serves(implementation)
    got = produce(op, implementation.function, case.inputs(seed, "cuda"))
    assert all(tensor.is_cuda for tensor in got.values())
    assert_parity(op, got, produce(op, op.reference, case.inputs(seed)), f"{op.name} {case.name}")


@each_case
def test_same_bits_twice_and_nothing_left_unwritten(op, implementation, case):
    """The second run finds every tensor that it allocates filled with NaN or the largest integer."""
    _serves(implementation)
    want = produce(op, implementation.function, case.inputs(3, "cuda"))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        got = produce(op, implementation.function, case.inputs(3, "cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(got, want, op.name)


@each_case
def test_only_declared_arguments_are_written(op, implementation, case):
    _serves(implementation)
    given, fresh = case.inputs(3, "cuda"), case.inputs(3, "cuda")
    produce(op, implementation.function, given)
    kept = [n for n, t in given.items() if isinstance(t, torch.Tensor) and n not in op.mutates]
    assert_same_bits({n: given[n] for n in kept}, {n: fresh[n] for n in kept}, op.name)


def _signature(given):
    return {n: (t.shape, t.stride()) if isinstance(t, torch.Tensor) else t for n, t in given.items()}


@each_case
def test_graph_replay_follows_changed_inputs(op, implementation, case):
    """Captured on one set of inputs, replayed on another of the same sizes: the bits of an eager call."""
    _serves(implementation)
    static, other = case.inputs(4, "cuda"), case.inputs(5, "cuda")
    if _signature(static) != _signature(other):
        pytest.skip("sizes of this case depend on its seed")
    produce(op, implementation.function, case.inputs(4, "cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = produce(op, implementation.function, static)
    for name, tensor in other.items():
        if isinstance(tensor, torch.Tensor):
            static[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(got, produce(op, implementation.function, other), op.name)
