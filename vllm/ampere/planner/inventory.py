# SPDX-License-Identifier: Apache-2.0
"""What is in the box: nodes of equal cards and the links between them.

From words (`8x80`, `2x8x40`), a JSON file, or the cards of this machine.
"""

import json
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import AmpereError, UsageError

# Bytes a second of a card's own memory, by its size, in GB/s: A100 and A800 80, GA100 64, A6000 48, A100 40, 3090 24.
_CARD_GB_S = {80: 1935.0, 64: 1640.0, 48: 768.0, 40: 1555.0, 24: 936.0}
# Their dense bfloat16 matrix rate, TFLOP/s; a GA100 of 64 is taken for an A100.
_CARD_TFLOPS = {80: 312.0, 64: 312.0, 48: 155.0, 40: 312.0, 24: 71.0}
# Eight cards on two sockets are the common box.
_ISLAND = 4
_SHAPE = re.compile(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)")
_SHAPE_HINT = "write CARDSxGIB, as 8x80, or NODESxCARDSxGIB, as 2x8x40"


class LinkKind(StrEnum):
    """How two cards reach each other, best first."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    SOCKET = "socket"
    NETWORK = "network"


class Link(BaseModel):
    """One kind of link.

    Attributes:
        latency_us: one message, card to card.
        gb_s: bandwidth one way, GB/s.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    latency_us: Annotated[float, Field(gt=0)]
    gb_s: Annotated[float, Field(gt=0)]


class Sample(BaseModel):
    """One thing that `plan --probe` timed.

    Attributes:
        what: "all-reduce", "message" from the first card of a group to the last, or "from host" to all cards at once.
        link: the slowest link on the way; "host" for the last.
        cards: that took part.
        nbytes, us: size and time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    what: str
    link: str
    cards: int
    nbytes: int
    us: Annotated[float, Field(gt=0)]

    @property
    def gb_s(self) -> float:
        """Bytes over time."""
        return self.nbytes / self.us / 1e3


# Latencies that reproduce single published figures (docs/en/topologies.md): 14 us for an all-reduce over NVLink,
# 44 us over two sockets, 15 us for one hop between nodes. Below one switch is an estimate.
LINKS = {
    LinkKind.NVLINK: Link(latency_us=0.57, gb_s=200.0),
    LinkKind.PCIE: Link(latency_us=1.5, gb_s=20.0),
    LinkKind.SOCKET: Link(latency_us=2.7, gb_s=12.0),
    LinkKind.NETWORK: Link(latency_us=8.0, gb_s=12.0),
}


class Inventory(BaseModel):
    """Equal nodes of equal cards.

    Attributes:
        nodes, cards: nodes, and cards in each.
        card_gib: memory of a card as its driver reports it.
        link: "nvlink" joins all cards of a node; "pcie" joins islands, through sockets.
        island: cards under one PCIe switch or socket.
        card_gb_s: bandwidth of a card's memory; None looks it up by size.
        host_gib: host memory of a node that may be pinned; None leaves it unchecked.
        links: measured links that replace the defaults.
        samples: what `links` was made from; no plan reads them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    nodes: Annotated[int, Field(ge=1)] = 1
    cards: Annotated[int, Field(ge=1)]
    card_gib: Annotated[float, Field(gt=0)]
    link: LinkKind = LinkKind.PCIE
    island: Annotated[int, Field(ge=1)] = _ISLAND
    card_gb_s: Annotated[float, Field(gt=0)] | None = None
    host_gib: Annotated[float, Field(gt=0)] | None = None
    links: dict[LinkKind, Link] = {}
    samples: tuple[Sample, ...] = ()

    @model_validator(mode="after")
    def _cards_of_a_node_are_linked(self) -> "Inventory":
        if self.link not in (LinkKind.NVLINK, LinkKind.PCIE):
            raise ValueError("link is the one inside a node: nvlink or pcie")
        return self

    @property
    def total(self) -> int:
        """Cards of all nodes."""
        return self.nodes * self.cards

    @property
    def memory_gb_s(self) -> float:
        """Bandwidth of one card's memory."""
        return self.card_gb_s or _CARD_GB_S[self._known_size]

    @property
    def matrix_tflops(self) -> float:
        """Dense bfloat16 matrix rate of one card."""
        return _CARD_TFLOPS[self._known_size]

    @property
    def _known_size(self) -> int:
        return min(_CARD_GB_S, key=lambda size: abs(size - self.card_gib))

    def kind_between(self, first: int, last: int) -> LinkKind:
        """The slowest link among the cards `first` to `last`, numbered over all nodes."""
        if first // self.cards != last // self.cards:
            return LinkKind.NETWORK
        if self.link is LinkKind.NVLINK:
            return LinkKind.NVLINK
        below = first % self.cards // self.island == last % self.cards // self.island
        return LinkKind.PCIE if below else LinkKind.SOCKET

    def link_between(self, first: int, last: int) -> Link:
        """Latency and bandwidth of that link."""
        kind = self.kind_between(first, last)
        return self.links.get(kind, LINKS[kind])


def parse(shape: str, link: str = LinkKind.PCIE) -> Inventory:
    """Read `8x80` or `2x8x40`.

    Raises:
        UsageError: another shape, or no cards.
    """
    match = _SHAPE.fullmatch(shape)
    if not match:
        raise UsageError(f"{shape!r} is no set of cards", _SHAPE_HINT)
    nodes, cards, gib = match.groups()
    fields = {"nodes": int(nodes or 1), "cards": int(cards), "card_gib": float(gib), "link": link}
    return _checked(fields, shape, _SHAPE_HINT)


def load(path: Path) -> Inventory:
    """Read a JSON object with the fields of `Inventory`.

    Raises:
        UsageError: no such file, no JSON, or a wrong field.
    """
    example = 'give a JSON object, as {"cards": 8, "card_gib": 80}'
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", example) from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", example) from error
    return _checked(values, str(path), f"the fields are {', '.join(Inventory.model_fields)}")


def detect(visible: str | None = None) -> Inventory:
    """The cards of this machine, through the package nvidia-ml-py.

    Args:
        visible: indices or UUIDs of cards as CUDA_VISIBLE_DEVICES lists them; None takes all.

    Raises:
        AmpereError: no package, no driver, no cards, or cards that differ.
    """
    hint = "name the cards instead: --gpus 8x80 --link pcie"
    try:
        import pynvml
    except ImportError as error:
        raise AmpereError("cannot see this machine's cards: the package nvidia-ml-py is not installed", hint) from error
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        if visible is not None:
            uuids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            handles = [handles[i] for word in visible.split(",") for i in _named(word.strip(), uuids)]
        memory = [pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2) for handle in handles]
        names = {_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles}
        linked = all(_has_nvlink(pynvml, handle) for handle in handles)
        island = _island(pynvml, handles)
    except pynvml.NVMLError as error:
        raise AmpereError(f"cannot see this machine's cards: {error}", hint) from error
    if not handles:
        raise AmpereError("this machine has no NVIDIA cards that may be used", hint)
    if len({each.total for each in memory}) > 1 or len(names) > 1:
        raise AmpereError(f"the cards of this machine differ: {', '.join(sorted(names))}", "plan for equal cards only")
    link = LinkKind.NVLINK if linked else LinkKind.PCIE
    # What the driver keeps to itself, 0.85 GiB of an A100's 80, is in its total and not in CUDA's.
    usable = min(each.total - each.reserved for each in memory)
    return Inventory(cards=len(handles), card_gib=usable / 2**30, link=link, island=island)


def _named(word: str, uuids: list[str]) -> list[int]:
    """The card that a word of CUDA_VISIBLE_DEVICES names: none, or one."""
    if word.isdigit():
        return [int(word)] if int(word) < len(uuids) else []
    return [index for index, uuid in enumerate(uuids) if len(word) > 4 and uuid.startswith(word)]


def _island(pynvml: Any, handles: list[Any]) -> int:
    """The most cards in a row that are always on one socket; the default where the driver does not say."""
    count = len(handles)

    def together(size: int) -> bool:
        pairs = ((handles[i - i % size], handles[i]) for i in range(count) if i % size)
        return all(pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair) < pynvml.NVML_TOPOLOGY_SYSTEM for pair in pairs)

    try:
        return next((size for size in range(count, 1, -1) if count % size == 0 and together(size)), 1)
    except pynvml.NVMLError:
        return _ISLAND


def _has_nvlink(pynvml: Any, handle: Any) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, 0))
    except pynvml.NVMLError:
        return False


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _checked(values: Any, where: str, hint: str) -> Inventory:
    try:
        return Inventory.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        raise UsageError(": ".join([where, *map(str, fault["loc"]), fault["msg"]]), hint) from error
