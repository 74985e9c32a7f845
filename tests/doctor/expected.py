# SPDX-License-Identifier: Apache-2.0
"""A change to the machine and what a check says of it."""

from dataclasses import dataclass
from typing import Callable

from tests.doctor.machine import Machine
from vllm.ampere.doctor.findings import Status
from vllm.ampere.doctor.system import Space

OK, FAIL, WARN, UNKNOWN = Status.OK, Status.FAIL, Status.WARN, Status.UNKNOWN
ONE_NODE = "a800-80g-x8-tp4-pp2"
TWO_NODES = "a800-40g-x16-tp8-pp2"
Change = Callable[[Machine], dict | None]


@dataclass(frozen=True)
class Expected:
    """One change and the finding.

    Attributes:
        code, status, words: of the finding; `words` is a part of what was seen.
        change: alters the machine; what it returns is asked of the doctor as well (preset, model, peer).
    """

    code: str
    status: Status
    words: str
    change: Change

    def __str__(self) -> str:
        return f"{self.code} {self.status.name} {self.words}"


def write(path: str, text: str) -> Change:
    return lambda machine: machine.write(path, text)


def remove(*paths: str) -> Change:
    def change(machine):
        for path in paths:
            machine.remove(path)

    return change


def variables(preset: str | None = None, **values: str) -> Change:
    def change(machine):
        machine.variables.update(values)
        return {"preset": preset}

    return change


def attributes(**values) -> Change:
    return lambda machine: vars(machine).update(values)


def every(**changes) -> Change:
    return lambda machine: machine.each_card(**changes)


def one(index: int, **changes) -> Change:
    return lambda machine: machine.one_card(index, **changes)


def package(name: str, version: str | None) -> Change:
    return lambda machine: machine.package(name, version)


def space(folder: str, total: float, free: float) -> Change:
    return lambda machine: machine.spaces.update({folder: Space(int(total), int(free))})


def both(*changes: Change) -> Change:
    def change(machine):
        asked = {}
        for each in changes:
            asked |= each(machine) or {}
        return asked

    return change


def asking(**asked) -> Change:
    return lambda machine: asked
