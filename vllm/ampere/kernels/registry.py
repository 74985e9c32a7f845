# SPDX-License-Identifier: Apache-2.0
"""One declaration per op: what it takes, what it returns, who can run it, how exact it must be.

Tests, `kernels check`, benchmarks and the generated kernel table all read these declarations.
"""

import functools
import importlib
import logging
import pkgutil
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping

import torch

from .. import arch, envs
from ..errors import SelectionError
from . import contracts
from .contracts import Arg

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tolerance:
    """How far an implementation may be from the reference, per output.

    Attributes:
        relative_norm: bound on ||got - want|| / ||want||, in float64. 0 asks for equal bits.
        worst: bound on max|got - want| / rms(want).
    """

    relative_norm: float
    worst: float


EXACT = Tolerance(0.0, 0.0)


@dataclass(frozen=True)
class Case:
    """One named set of inputs.

    Attributes:
        name: short, unique within the op.
        sizes: axis sizes and other parameters, passed to `make`.
        make: (sizes, generator, device) -> keyword arguments of the public function. Random values
            come from `generator` only; nothing is shared between two calls.
    """

    name: str
    sizes: Mapping[str, Any]
    make: Callable[[Mapping[str, Any], torch.Generator, torch.device], dict[str, Any]]

    def inputs(self, seed: int = 0, device: str | torch.device = "cpu") -> dict[str, Any]:
        """Fresh inputs of this case."""
        device = torch.device(device)
        return self.make(self.sizes, torch.Generator("cpu").manual_seed(seed), device)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: "triton", "tilelang", "torch", or "reference".
        function: same signature as the public function, without `implementation`; arguments are checked.
        architectures: names from `arch.ARCHITECTURES`; the best implementation comes first in `Op.implementations`.
        requires: returns why it cannot run in this process, or "" if it can.
    """

    name: str
    function: Callable
    architectures: tuple[str, ...]
    requires: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Op:
    """Declaration of one op.

    Attributes:
        name: the noun phrase the field uses; also the stem of its test and tuned file.
        summary: one sentence.
        axes: axis name to meaning, with its unit.
        inputs: tensor arguments; arguments that are not tensors are described in the docstring only.
        outputs: returned tensors, in order.
        reference: float32 computation in plain PyTorch; serves the CPU, and a GPU only when asked by name.
        implementations: the others, best first.
        tolerances: output or mutated argument name to Tolerance, for implementations against the reference.
        cases: inputs that tests and benchmarks run.
        bytes_moved, flops: work of one case, from its sizes; the floor of a benchmark.
        mutates: names of arguments written in place.
        replaces: the upstream symbol whose place it takes, or "".
        source: section of the model specification.
    """

    name: str
    summary: str
    axes: Mapping[str, str]
    inputs: tuple[Arg, ...]
    outputs: tuple[Arg, ...]
    reference: Callable
    tolerances: Mapping[str, Tolerance]
    cases: tuple[Case, ...]
    bytes_moved: Callable[[Mapping[str, Any]], int]
    flops: Callable[[Mapping[str, Any]], int]
    implementations: tuple[Implementation, ...] = ()
    mutates: tuple[str, ...] = ()
    replaces: str = ""
    source: str = ""
    _chosen: dict = field(default_factory=dict, compare=False, repr=False)

    def check(self, **given) -> dict[str, int]:
        """Check the tensor arguments; return axis sizes. Raises ContractError."""
        return contracts.check(self.name, self.inputs, given)

    def choose(self, device: str | torch.device, name: str | None = None) -> Callable:
        """The implementation for a device; see `choose_for`."""
        return self.choose_for(arch.of_device(device).name, name)

    def choose_for(self, architecture: str, name: str | None = None) -> Callable:
        """The implementation for an architecture, chosen once for each request and logged.

        Args:
            architecture: a key of `arch.ARCHITECTURES`.
            name: an implementation asked for; default is the entry of `VLLM_AMPERE_KERNELS`, else the best.

        Raises:
            SelectionError: the one asked for cannot run here, or none can.
        """
        kernels = envs.kernels()
        asked = name or kernels.get(self.name) or kernels.get("*")
        key = (architecture, asked)
        if key not in self._chosen:
            self._chosen[key] = self._select(architecture, asked)
        return self._chosen[key]

    def _select(self, where: str, asked: str | None) -> Callable:
        reference = Implementation("reference", self.reference, ("cpu",) if asked != "reference" else tuple(arch.ARCHITECTURES))
        candidates = (*self.implementations, reference)
        if asked and asked not in {c.name for c in candidates}:
            have = ", ".join(c.name for c in candidates)
            raise SelectionError(f"{self.name} has no implementation {asked}", f"it has: {have}")
        lost = []
        for candidate in candidates:
            if asked and candidate.name != asked:
                reason = f"{asked} was asked for"
            elif where not in candidate.architectures:
                reason = f"does not serve {where}"
            else:
                reason = candidate.requires()
            if not reason:
                logger.info("%s: %s on %s%s", self.name, candidate.name, where, "".join(f"; {r}" for r in lost))
                return candidate.function
            lost.append(f"{candidate.name} lost: {reason}")
        reasons = "; ".join(lost)
        raise SelectionError(
            f"{self.name}: no implementation runs on {where} ({reasons})",
            'VLLM_AMPERE_KERNELS="*=reference" runs the PyTorch references, slowly',
        )


@functools.cache
def all_ops() -> dict[str, Op]:
    """Every op of the package by name, found by importing each module below `kernels`.

    A module declares one `OP`, or `OPS` where a file's ops are each other's inverse.
    """
    from .. import kernels

    found: dict[str, Op] = {}
    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        loaded = importlib.import_module(module.name)
        for op in (*getattr(loaded, "OPS", ()), *([loaded.OP] if hasattr(loaded, "OP") else [])):
            if op.name in found:
                raise SelectionError(f"two ops are named {op.name}", "rename one")
            found[op.name] = op
    return dict(sorted(found.items()))
