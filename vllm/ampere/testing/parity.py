# SPDX-License-Identifier: Apache-2.0
"""Run an implementation of an op on a case, and compare all that it returned or wrote with the reference."""

from typing import Any, Callable, Mapping

import torch

from ..kernels.registry import Case, Implementation, Op, all_ops
from .compare import assert_close


def implemented_cases() -> list[tuple[Op, Implementation, Case]]:
    """Every case of every op that has an implementation besides the reference."""
    return [(op, i, case) for op in all_ops().values() for i in op.implementations for case in op.cases]


def produce(op: Op, function: Callable, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Call `function` with `given`; what it returned, then what it wrote in place, by declared name."""
    returned = function(**given)
    returned = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    assert len(returned) == len(op.outputs), f"{op.name}: {len(returned)} results, {len(op.outputs)} declared"
    produced = {arg.name: tensor for arg, tensor in zip(op.outputs, returned)}
    return produced | {name: given[name] for name in op.mutates if given.get(name) is not None}


def assert_parity(op: Op, got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], label: str = "") -> None:
    """Raise AssertionError unless each tensor is within the op's tolerance of the reference, dtype and shape equal."""
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype, f"{label} {name}: {tensor.dtype}, want {want[name].dtype}"
        assert_close(tensor.cpu(), want[name].cpu(), op.tolerances[name], f"{label} {name}")


def assert_same_bits(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], label: str = "") -> None:
    """Raise AssertionError unless the tensors of both are equal byte for byte."""
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == want[name].dtype and tensor.shape == want[name].shape, f"{label} {name}"
        bytes_of = [x.contiguous().flatten().view(torch.uint8) for x in (tensor, want[name])]
        different = bytes_of[0] != bytes_of[1]
        assert not different.any(), f"{label} {name}: {int(different.sum())} bytes of {different.numel()} differ"
