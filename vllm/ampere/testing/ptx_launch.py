# SPDX-License-Identifier: Apache-2.0
"""Let a process without a card launch our kernels: each is compiled for Ampere and run by `ptx_machine`."""

import contextlib
import functools

from .. import arch
from . import ptx_machine
from .compile_check import compiled
from .specialization import bound, launches_go_to


@functools.cache
def compiled_ptx(kernel, types: tuple, constexprs: tuple, options: tuple, architecture: str) -> tuple[str, int]:
    """(PTX, bytes of shared memory) of a kernel, compiled once for each key."""
    built = compiled(kernel, dict(types), dict(constexprs), dict(options), architecture)
    return built.asm["ptx"], built.metadata.shared


def launch(kernel, grid, *args, architecture: str = "sm80", **options) -> int:
    """Compile a kernel as `kernel[grid](*args, **options)` would, and run it on CPU tensors.

    Returns: instructions, as `ptx_machine.run` counts them.
    Raises: MachineFault, as `ptx_machine.run` does.
    """
    arguments, specialization = bound(kernel, *args, **options)
    types, constexprs = {}, {}
    for (name, value), (kind, attribute) in zip(arguments.items(), specialization, strict=True):
        aligned = isinstance(attribute, str) and "D" in attribute
        types[name] = kind + ":16" * aligned
        if kind == "constexpr":
            constexprs[name] = value
    kept = {n: v for n, v in options.items() if n not in arguments}
    ptx, shared = compiled_ptx(kernel, *(tuple(d.items()) for d in (types, constexprs, kept)), architecture)
    sizes = grid(arguments) if callable(grid) else grid
    given = [value for name, value in arguments.items() if types[name] != "constexpr"]
    return ptx_machine.run(ptx, sizes, given, shared_bytes=shared)


def on_the_cpu(architecture: arch.Architecture = arch.SM80) -> contextlib.AbstractContextManager[None]:
    """Kernels of ours that are launched inside run on the CPU, as compiled for an architecture, on CPU tensors."""
    return launches_go_to(functools.partial(launch, architecture=architecture.name), architecture)
