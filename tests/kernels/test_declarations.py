# SPDX-License-Identifier: Apache-2.0
"""What every op owes by its declaration alone, so that no op's own test has to repeat it."""

import dataclasses
import importlib
import inspect
import pkgutil

import pytest
import torch

from vllm.ampere import kernels
from vllm.ampere.errors import AmpereError, ContractError
from vllm.ampere.kernels import contracts
from vllm.ampere.kernels.registry import all_ops

SECTIONS = ("Axes:", "Args:", "Returns:", "Numerics:", "Graph safety:", "Raises:", "Source:")


def _modules():
    for found in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        module = importlib.import_module(found.name)
        for op in (*getattr(module, "OPS", ()), *([module.OP] if hasattr(module, "OP") else [])):
            yield op, module


PUBLIC = {op.name: getattr(module, op.name, None) for op, module in _modules()}
OPS = list(all_ops().values())
CASES = [(op, case) for op in OPS for case in op.cases]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
each_case = pytest.mark.parametrize("op, case", CASES, ids=[f"{op.name}-{case.name}" for op, case in CASES])


def _arguments(op, given):
    return {arg.name: given.get(arg.name) for arg in op.inputs}


def _call(op, case, function=None):
    """(everything that the call returned or wrote, by name; the arguments)."""
    given = case.inputs(seed=3)
    returned = (function or PUBLIC[op.name])(**given)
    returned = returned if isinstance(returned, tuple) else () if returned is None else (returned,)
    assert len(returned) == len(op.outputs)
    produced = {f"returned {arg.name}": tensor for arg, tensor in zip(op.outputs, returned)}
    produced |= {name: given[name] for name in op.mutates if given[name] is not None}
    return produced, given


def _same_bits(got, want):
    assert got.keys() == want.keys()
    for name in got:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        assert torch.equal(got[name].flatten().view(torch.uint8), want[name].flatten().view(torch.uint8)), name


@each_op
def test_public_function_has_every_section(op):
    text = inspect.getdoc(PUBLIC[op.name])
    assert not [s for s in SECTIONS if f"\n{s}" not in text]
    arguments = text[text.index("\nArgs:") : text.index("\nReturns:")]
    assert not [a.name for a in op.inputs if a.name not in arguments]
    assert op.summary.endswith(".") and op.source


@each_op
def test_reference_takes_the_arguments_of_the_public_function(op):
    public = dict(inspect.signature(PUBLIC[op.name]).parameters)
    assert public.pop("implementation").default is None
    reference = inspect.signature(op.reference).parameters
    extra = [n for n in reference if n not in public]
    assert list(reference)[: len(public)] == list(public)
    assert all(reference[n].default is not inspect.Parameter.empty for n in extra)
    assert {a.name for a in op.inputs} <= public.keys()
    assert set(op.mutates) <= {a.name for a in op.inputs}
    assert set(op.tolerances) == {a.name for a in op.outputs} | set(op.mutates)


@each_op
def test_case_names_are_unique(op):
    names = [case.name for case in op.cases]
    assert names and len(set(names)) == len(names)


@each_case
def test_results_are_as_declared(op, case):
    produced, given = _call(op, case)
    axes = op.check(**_arguments(op, case.inputs(seed=3)))
    declared = [dataclasses.replace(arg, name=f"returned {arg.name}") for arg in op.outputs]
    contracts.check(op.name, (*op.inputs, *declared), _arguments(op, given) | produced)
    assert axes or not any(arg.shape != "..." for arg in op.inputs)
    assert op.bytes_moved(case.sizes) >= 0 and op.flops(case.sizes) >= 0


@each_case
def test_only_declared_arguments_are_written(op, case):
    _, given = _call(op, case)
    fresh = case.inputs(seed=3)
    kept = {n: t for n, t in given.items() if isinstance(t, torch.Tensor) and n not in (*op.mutates, "out")}
    _same_bits(kept, {n: fresh[n] for n in kept})


@each_case
def test_same_bits_twice_and_nothing_left_unwritten(op, case):
    """The second run finds every new tensor filled with NaN or the largest integer."""
    want, _ = _call(op, case)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        got, _ = _call(op, case)
    finally:
        torch.use_deterministic_algorithms(False)
    _same_bits(got, want)


@pytest.mark.parametrize(
    "op", [op for op in OPS if any(a.name == "out" and a.optional for a in op.inputs)], ids=lambda op: op.name
)
def test_given_result_tensor_is_filled_and_returned(op):
    for case in op.cases:
        given = case.inputs(seed=3)
        want = PUBLIC[op.name](**given)
        out = torch.full_like(want, torch.nan)
        got = PUBLIC[op.name](**case.inputs(seed=3), out=out)
        assert got.data_ptr() == out.data_ptr()
        _same_bits({"out": out}, {"out": want})


def _fullest(op):
    """The case that gives the most arguments and no empty one."""

    def count(case):
        tensors = [t for t in _arguments(op, case.inputs(seed=3)).values() if t is not None]
        return all(t.numel() for t in tensors), len(tensors)

    return max(op.cases, key=count)


FULL = {op.name: _fullest(op) for op in OPS}
GIVEN = {
    op.name: {n: t for n, t in _arguments(op, FULL[op.name].inputs(seed=3)).items() if t is not None} for op in OPS
}
ARGS = [(op, arg) for op in OPS for arg in op.inputs if arg.name in GIVEN[op.name]]


def _error_with(op, arg, edit):
    """What the public function raises when one argument is edited."""
    given = FULL[op.name].inputs(seed=3)
    given[arg.name] = edit(given[arg.name])
    with pytest.raises(AmpereError) as caught:
        PUBLIC[op.name](**given)
    return caught.value


def each_arg(wanted=lambda op, arg: True):
    chosen = [(op, arg) for op, arg in ARGS if wanted(op, arg)]
    return pytest.mark.parametrize("op, arg", chosen, ids=[f"{op.name}-{arg.name}" for op, arg in chosen])


@each_arg()
def test_wrong_dtype_names_the_argument(op, arg):
    error = _error_with(op, arg, lambda x: x.to(torch.complex64))
    assert isinstance(error, ContractError) and f"{op.name}: {arg.name} is complex64" in str(error)


@each_arg(lambda op, arg: arg.shape != "...")
def test_wrong_rank_names_the_argument(op, arg):
    error = _error_with(op, arg, lambda x: x.unsqueeze(0))
    assert isinstance(error, ContractError) and f"{op.name}: {arg.name} has shape" in str(error)


@each_arg(lambda op, arg: arg.contiguous == "word pages")
def test_pages_that_start_between_words(op, arg):
    """Records are read four bytes at a time."""
    cache = GIVEN[op.name][arg.name]
    size = cache[0].numel()
    pool = torch.zeros(len(cache) * (size + 64) + 4, dtype=torch.uint8)
    for stride, offset in ((size + 61, 0), (size + 64, 50)):
        moved = pool.as_strided(cache.shape, (stride, *cache.stride()[1:]), offset)
        with pytest.raises(ContractError, match=f"each page of {arg.name} must start at a multiple of 4 bytes"):
            op.check(**(GIVEN[op.name] | {arg.name: moved}))


@each_arg(lambda op, arg: arg.contiguous != "any" and GIVEN[op.name][arg.name].shape[-1] > 1)
def test_wrong_stride_names_the_argument(op, arg):
    error = _error_with(op, arg, lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2])
    assert isinstance(error, ContractError) and f" {arg.name} must be" in str(error)


@each_arg(lambda op, arg: arg.name != next(iter(GIVEN[op.name])))
def test_wrong_device_names_the_argument(op, arg):
    error = _error_with(op, arg, lambda x: x.to("meta"))
    assert isinstance(error, ContractError) and f"{op.name}: {arg.name} is on meta" in str(error)


@each_arg(lambda op, arg: arg.name == next(iter(GIVEN[op.name])))
def test_stray_device_of_the_first_argument_is_reported(op, arg):
    """The first argument sets the device, so the second is the one found elsewhere."""
    assert "meta" in str(_error_with(op, arg, lambda x: x.to("meta")))


@each_arg(lambda op, arg: not arg.optional)
def test_missing_argument_is_named(op, arg):
    assert f"{op.name}: {arg.name} is missing" in str(_error_with(op, arg, lambda x: None))
