# SPDX-License-Identifier: Apache-2.0
"""Area 6, two nodes: this one beside the report of another, `vllm-ampere doctor --format json` of there."""

import hashlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from ..checkpoint import CheckpointReport
from ..errors import AmpereError, UsageError
from .case import Case
from .findings import Finding, Outcome, Unknown, fail, ok, warn

SCHEMA = 1
_PACKAGES = ("vllm", "vllm-ampere", "torch", "triton", "tilelang", "transformers", "nvidia-nccl-cu13")
# Read by every rank; a difference makes one wait for another.
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "VLLM_AMPERE_", "VLLM_PP_")


@dataclass(frozen=True)
class Facts:
    """What nodes of one server must agree on; None is not known.

    Attributes:
        packages: version of each package that is installed.
        driver: version of the NVIDIA driver.
        cards: how many visible cards there are of each name and size.
        patches: hash of every file that the series touches.
        checkpoint: hash of configuration, tokenizer and where each tensor lies; no weight is read.
        variables: of NCCL, gloo and this project.
    """

    __pydantic_config__ = {"extra": "forbid"}

    packages: dict[str, str] | None
    driver: str | None
    cards: dict[str, int] | None
    patches: str | None
    checkpoint: str | None
    variables: dict[str, str]


@dataclass(frozen=True)
class Report:
    """What `--format json` prints.

    Attributes:
        schema: 1.
        facts: for `--peer` on another node; None where a log was read.
        findings: one for each check.
    """

    __pydantic_config__ = {"extra": "forbid"}

    schema: int
    facts: Facts | None
    findings: list[Finding]


def facts(case: Case) -> Facts:
    """This node's."""
    return Facts(**{name: _known(ask, case) for name, ask in _ASK.items()})


def load(path: Path) -> Report:
    """Read a report.

    Raises:
        UsageError: no such file, or not a report.
        AmpereError: pydantic is missing.
    """
    hint = "write it on the other node: vllm-ampere doctor --format json > other.json"
    try:
        from pydantic import TypeAdapter, ValidationError
    except ImportError as error:
        message = "--peer needs the package pydantic, which is not installed"
        raise AmpereError(message, "install vLLM, which brings it, or pydantic alone") from error
    try:
        report = TypeAdapter(Report).validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint) from error
    except ValidationError as error:
        fault = error.errors()[0]
        raise UsageError(": ".join([str(path), *map(str, fault["loc"]), fault["msg"]]), hint) from error
    if report.schema != SCHEMA:
        raise UsageError(f"{path} has schema {report.schema}, must have {SCHEMA}", "use the same version on both nodes")
    if report.facts is None:
        raise UsageError(f"{path} is the report of a log, not of a machine", hint)
    return report


def _known(ask: Callable[[Case], Any], case: Case) -> Any:
    try:
        return ask(case)
    except Exception:  # the checks say why; what is not known here is only not compared
        return None


def _packages(case: Case) -> dict[str, str]:
    return {name: version for name in _PACKAGES if (version := case.system.version(name))}


def _cards(case: Case) -> dict[str, int]:
    return dict(Counter(f"{card.name} {card.memory_bytes / 2**30:.1f} GiB" for card in case.cards))


def _patches(case: Case) -> str:
    if case.system.tree is None:
        raise Unknown("no vLLM is installed here")
    digest = hashlib.sha256()
    for file in case.survey:
        digest.update(file.change.path.encode() + b"\0" + hashlib.sha256(file.content or b"").digest())
    return digest.hexdigest()


def _checkpoint(case: Case) -> str:
    if case.model is None:
        raise Unknown("no --model is given here")
    if not isinstance(case.checkpoint, CheckpointReport):
        raise Unknown(str(case.checkpoint))
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json"):
        digest.update(hashlib.sha256((case.model / name).read_bytes()).digest())
    for name, tensor in sorted(case.checkpoint.tensors.items()):
        where = (name, tensor.spec.dtype, tensor.spec.shape, tensor.file, tensor.offset_bytes)
        digest.update(repr(where).encode())
    return digest.hexdigest()


def _variables(case: Case) -> dict[str, str]:
    return {name: value for name, value in sorted(case.system.variables.items()) if name.startswith(_PREFIXES)}


_ASK: dict[str, Callable[[Case], Any]] = {
    "packages": _packages,
    "driver": lambda case: case.system.driver.version,
    "cards": _cards,
    "patches": _patches,
    "checkpoint": _checkpoint,
    "variables": _variables,
}


def _compare(
    name: str, verdict: Callable[[str], Outcome], same: str, other: str = ""
) -> Callable[[Case], Outcome | None]:
    """The check that one fact is the same on both nodes; `other` says a difference that is not key by key."""

    def check(case: Case) -> Outcome | None:
        if case.peer is None:
            return None
        here, there = _ASK[name](case), getattr(case.peer.facts, name)
        if there is None:
            raise Unknown("the other node's report does not say")
        if here == there:
            return ok(same)
        return verdict(other.format(here=here, there=there) if other else _difference(here, there))

    return check


def _difference(here: Mapping[str, object], there: Mapping[str, object]) -> str:
    return ", ".join(
        f"{name}: {here.get(name, 'none')} here, {there.get(name, 'none')} there"
        for name in sorted({*here, *there}) if here.get(name) != there.get(name)
    )


CHECKS = {
    "AMP611": _compare("packages", fail, "the same versions"),
    "AMP612": _compare("driver", warn, "the same driver", "driver {here} here, {there} there"),
    "AMP613": _compare("cards", fail, "the same cards"),
    "AMP614": _compare("patches", fail, "the same patched files", "the patched files differ"),
    "AMP615": _compare("checkpoint", fail, "the same checkpoint", "the checkpoints differ"),
    "AMP616": _compare("variables", warn, "the same variables"),
}
