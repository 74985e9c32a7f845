# SPDX-License-Identifier: Apache-2.0
"""The NVIDIA driver's view of the cards, through the package nvidia-ml-py, as plain values."""

from dataclasses import dataclass
from itertools import combinations
from typing import Any, Callable

from .findings import Unknown

# The links of an A100; NVML_MEMORY_ERROR_TYPE_UNCORRECTED and NVML_AGGREGATE_ECC; NVML_P2P_CAPS_INDEX_READ, which
# some releases of the package define as a tuple.
_LINKS = 12
_UNCORRECTED = (1, 1)
_READ = 0


@dataclass(frozen=True)
class Card:
    """One card; None is what the driver does not say of it.

    Attributes:
        index, name, uuid, bus: of the driver; `bus` as /sys/bus/pci/devices names it.
        capability: compute capability.
        memory_bytes, used_bytes: all, and taken by anybody.
        partitioned: MIG is on.
        uncorrected_errors: ECC errors that could not be corrected, since the card was made.
        remap_pending, remap_failed: rows of memory that wait for a reset to be replaced, or could not be.
        pcie_width, pcie_width_max, pcie_generation, pcie_generation_max: of its link.
        performance_state: 0 is full speed; an idle card lowers its link's generation.
        persistent: persistence mode is on.
        power_limit_w, power_default_w: watts.
        links, active_links: NVLink, and how many of them are up.
    """

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    used_bytes: int = 0
    uuid: str = ""
    bus: str = ""
    partitioned: bool | None = None
    uncorrected_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    performance_state: int | None = None
    persistent: bool | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    links: int = 0
    active_links: int = 0


@dataclass(frozen=True)
class Driver:
    """The driver.

    Attributes:
        version: as "580.65.06".
        cuda: the latest CUDA that it serves, as (13, 0).
        cards: all of the machine, whatever CUDA_VISIBLE_DEVICES says.
        strangers: pairs of indices that cannot read each other's memory.
    """

    version: str
    cuda: tuple[int, int]
    cards: tuple[Card, ...]
    strangers: tuple[tuple[int, int], ...] = ()


class NoAnswer(Unknown):
    """The driver was asked and did not answer."""


def read() -> Driver:
    """Ask the driver.

    Raises:
        Unknown: the package is not installed.
        NoAnswer: there is no driver, or it is broken.
    """
    try:
        import pynvml
    except ImportError:
        raise Unknown("the package nvidia-ml-py is not installed, so the driver cannot be asked") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoAnswer(f"the NVIDIA driver does not answer: {error}") from None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        return Driver(
            _text(pynvml.nvmlSystemGetDriverVersion()),
            (cuda // 1000, cuda % 1000 // 10),
            tuple(_card(pynvml, index, handle) for index, handle in enumerate(handles)),
            _strangers(pynvml, handles),
        )
    except pynvml.NVMLError as error:
        raise NoAnswer(f"the NVIDIA driver gives up: {error}") from None
    finally:
        pynvml.nvmlShutdown()


def _card(pynvml: Any, index: int, handle: Any) -> Card:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, name)(handle, *arguments)
        except (pynvml.NVMLError, AttributeError):
            return None

    def some(convert: Callable, value: Any) -> Any:
        return None if value is None else convert(value)

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    links = [state for state in (ask("nvmlDeviceGetNvLinkState", link) for link in range(_LINKS)) if state is not None]
    remapped = ask("nvmlDeviceGetRemappedRows")
    return Card(
        index=index,
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        bus=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:],
        partitioned=some(lambda modes: bool(modes[0]), ask("nvmlDeviceGetMigMode")),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", *_UNCORRECTED),
        remap_pending=some(lambda rows: bool(rows[2]), remapped),
        remap_failed=some(lambda rows: bool(rows[3]), remapped),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        pcie_generation_max=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        performance_state=ask("nvmlDeviceGetPerformanceState"),
        persistent=some(bool, ask("nvmlDeviceGetPersistenceMode")),
        power_limit_w=some(_watts, ask("nvmlDeviceGetPowerManagementLimit")),
        power_default_w=some(_watts, ask("nvmlDeviceGetPowerManagementDefaultLimit")),
        links=len(links),
        active_links=sum(map(bool, links)),
    )


def _strangers(pynvml: Any, handles: list) -> tuple[tuple[int, int], ...]:
    found = []
    for first, second in combinations(range(len(handles)), 2):
        try:
            if pynvml.nvmlDeviceGetP2PStatus(handles[first], handles[second], _READ):
                found.append((first, second))
        except (pynvml.NVMLError, AttributeError):
            continue
    return tuple(found)


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
