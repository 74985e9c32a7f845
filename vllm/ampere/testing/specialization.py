# SPDX-License-Identifier: Apache-2.0
"""Under which keys Triton would compile our kernels in a run, recorded without a card.

A key holds what Triton compiles a kernel for: the type of each argument, which integers are 1 or multiples of 16,
which pointers are aligned, the constants, and the options of the launch.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

from .. import arch, kernels
from ..kernels.registry import Op

_PACKAGE = kernels.__name__ + "."


@functools.cache
def _binder(kernel):
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    if not isinstance(kernel, JITFunction):  # under the interpreter
        named = ("do_not_specialize", "do_not_specialize_on_alignment")
        kernel = JITFunction(kernel.fn, **{name: kernel.kwargs.get(name) for name in named})
    return create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 80, 32)))


def bound(kernel, *args, **options) -> tuple[dict, list]:
    """(arguments by name, what Triton specialises for each: its type, and "D" in what follows where 16 divides it)."""
    arguments, specialization, _ = _binder(kernel)(*args, **options)
    return arguments, specialization


def key(kernel, *args, **options) -> tuple[str, str]:
    """The kernel's name, and what Triton would compile it for; tensors may be on the CPU."""
    _, specialization, rest = _binder(kernel)(*args, **options)
    return kernel.fn.__name__, f"{specialization} {sorted(rest.items())}"


@contextlib.contextmanager
def launches_go_to(call: Callable, architecture: arch.Architecture = arch.SM80) -> Iterator[None]:
    """What our kernels are launched with inside, as on an architecture, goes to `call(kernel, grid, *args, **options)`."""
    from triton.runtime.jit import KernelInterface

    launcher = KernelInterface.__getitem__

    def instead(kernel, grid):
        return functools.partial(call, kernel, grid) if kernel.fn.__module__.startswith(_PACKAGE) else launcher(kernel, grid)

    with (
        mock.patch.object(KernelInterface, "__getitem__", instead),
        mock.patch.object(arch, "of_device", lambda device: architecture),
    ):
        yield


@contextlib.contextmanager
def recorded_launches(architecture: arch.Architecture = arch.SM80) -> Iterator[set[tuple[str, str]]]:
    """Keys of our kernels launched inside, as on an architecture; none of them runs: outputs hold what was there."""
    seen: set[tuple[str, str]] = set()
    with launches_go_to(lambda kernel, grid, *args, **options: seen.add(key(kernel, *args, **options)), architecture):
        yield seen


def _copied(values, laid_out):
    """The values of one result in the tensors, and so with the strides, of another."""
    if isinstance(values, tuple):
        return tuple(map(_copied, values, laid_out))
    return values if values is None else laid_out.copy_(values)


@contextlib.contextmanager
def recorded_ops() -> Iterator[set[tuple[str, str]]]:
    """Keys of what ops called inside would launch, while their references compute the results."""

    def choose(op, device, name=None):
        if not op.implementations:
            return op.reference

        def call(*args, **options):
            laid_out = op.implementations[0].function(*args, **options)
            return _copied(op.reference(*args, **options), laid_out)

        return call

    with recorded_launches() as seen, mock.patch.object(Op, "choose", choose):
        yield seen
