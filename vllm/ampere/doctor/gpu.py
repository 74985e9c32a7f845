# SPDX-License-Identifier: Apache-2.0
"""Area 2: the cards."""

import re
from collections import Counter
from typing import Callable, Iterable

from .. import arch
from ..errors import UnsupportedDeviceError
from .case import Case
from .findings import Outcome, Unknown, fail, ok, warn
from .nvml import Card, NoAnswer

_GIB = 2**30
# What the driver itself keeps of an idle card is less.
_USED_BYTES = _GIB
# vLLM's default of --gpu-memory-utilization.
_MEMORY_FRACTION = 0.92
# Up to here a card is at work, and its link at full speed.
_BUSY_STATE = 2


def _cards(case: Case) -> Outcome:
    system = case.system
    try:
        cards = system.driver.cards
    except Unknown as reason:
        if not system.driver_is_loaded:
            return fail("no NVIDIA driver is loaded", _CONTAINER if system.in_container else "")
        if not any(re.fullmatch(r"nvidia\d+|dxg", name) for name in system.names("/dev")):
            return fail("the NVIDIA driver is loaded, but there is no /dev/nvidia0", _CONTAINER)
        if isinstance(reason, NoAnswer):
            return fail(str(reason), _BROKEN)
        raise
    if not cards:
        return fail("the driver lists no card")
    names = Counter(card.name for card in cards)
    seen = ", ".join(f"{count}x {name}" for name, count in names.items())
    hidden = len(cards) - len(case.cards)
    return ok(f"{seen}; CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else seen)


_CONTAINER = "start the container with --gpus all, and install the NVIDIA container toolkit on the host"
_BROKEN = "make nvidia-smi work first: reload the driver, restart the host, or give the container utility capability"


def _capability(case: Case) -> Outcome:
    seen = sorted({card.capability for card in case.cards})
    text = f"compute capability {', '.join(f'{major}.{minor}' for major, minor in seen)}"
    if (8, 9) in seen:
        return warn(f"{text}: 8.9 is not tuned for, it runs the SM86 kernels")
    try:
        ours = [arch.of_capability(*capability) for capability in seen]
    except UnsupportedDeviceError as error:
        return fail(str(error), error.hint)
    return ok(text if all(ours) else f"{text}: newer than Ampere, upstream's own kernels serve it")


def _equal(case: Case) -> Outcome:
    sizes = sorted({card.memory_bytes for card in case.cards})
    names = sorted({card.name for card in case.cards})
    capabilities = {card.capability for card in case.cards}
    if len(capabilities) > 1 or sizes[0] < 0.95 * sizes[-1]:
        return fail(f"the cards differ: {', '.join(names)}, {sizes[0] / _GIB:.1f} to {sizes[-1] / _GIB:.1f} GiB")
    if len(names) > 1:
        return warn(f"the cards have different names: {', '.join(names)}")
    return ok(f"{len(case.cards)}x {names[0]}, {sizes[0] / _GIB:.1f} GiB")


def _used(case: Case) -> Outcome:
    share = case.preset.serving.memory_fraction if case.preset else _MEMORY_FRACTION
    fullest = max(case.cards, key=lambda card: card.used_bytes)
    seen = f"card {fullest.index} has {fullest.used_bytes / _GIB:.1f} of {fullest.memory_bytes / _GIB:.1f} GiB in use"
    if fullest.used_bytes > (1 - share) * fullest.memory_bytes:
        return fail(f"{seen}; the server asks for {share:.0%} of it")
    return warn(seen) if fullest.used_bytes > _USED_BYTES else ok(seen)


def _sound(case: Case) -> Outcome:
    if found := _where(case.cards, lambda card: card.remap_failed):
        return fail(f"{found}: a broken row of memory could not be replaced", "have the card replaced")
    if found := _where(case.cards, lambda card: card.remap_pending):
        return warn(f"{found}: a row of memory waits for a reset to be replaced")
    if found := _where(case.cards, lambda card: card.uncorrected_errors):
        return warn(f"{found}: uncorrected memory errors are on record")
    known = [card for card in case.cards if card.uncorrected_errors is not None]
    if not known:
        raise Unknown("the driver counts no memory errors of these cards")
    return ok("no uncorrected memory error")


def _whole(case: Case) -> Outcome:
    found = _where(case.cards, lambda card: card.partitioned)
    return fail(f"{found}: MIG is on") if found else ok("no card is partitioned")


def _link(case: Case) -> Outcome:
    known = [card for card in case.cards if card.pcie_width and card.pcie_width_max]
    if not known:
        raise Unknown("the driver does not say how the cards are linked")
    if narrow := [card for card in known if card.pcie_width < card.pcie_width_max]:
        card = narrow[0]
        return warn(f"{_where(narrow)}: PCIe x{card.pcie_width} of x{card.pcie_width_max}")
    if slow := [card for card in known if _slow(card)]:
        card = slow[0]
        return warn(f"{_where(slow)}: PCIe generation {card.pcie_generation} of {card.pcie_generation_max}")
    return ok(f"PCIe x{min(card.pcie_width for card in known)}")


def _slow(card: Card) -> bool:
    """At work, and below its generation: an idle card lowers it by itself."""
    busy = card.performance_state is not None and card.performance_state <= _BUSY_STATE
    return busy and (card.pcie_generation or 0) < (card.pcie_generation_max or 0)


def _reach(case: Case) -> Outcome:
    indices = {card.index for card in case.cards}
    pairs = [pair for pair in case.system.driver.strangers if indices.issuperset(pair)]
    if pairs:
        return warn(f"{len(pairs)} pairs of cards cannot read each other's memory, the first is {pairs[0]}")
    return ok("all cards can read each other's memory" if len(indices) > 1 else "one card")


def _nvlink(case: Case) -> Outcome:
    counts = {card.active_links for card in case.cards}
    if len(counts) == 1:
        return ok(f"{counts.pop()} NVLinks are up on each card")
    fewest = _where(card for card in case.cards if card.active_links == min(counts))
    return warn(f"{fewest}: {min(counts)} NVLinks are up, {max(counts)} on others")


def _persistence(case: Case) -> Outcome:
    if all(card.persistent is None for card in case.cards):
        raise Unknown("the driver does not say whether persistence mode is on")
    found = _where(case.cards, lambda card: card.persistent is False)
    return warn(f"{found}: persistence mode is off") if found else ok("persistence mode is on")


def _power(case: Case) -> Outcome:
    known = [card for card in case.cards if card.power_limit_w and card.power_default_w]
    if not known:
        raise Unknown("the driver does not say what power the cards may draw")
    if capped := [card for card in known if card.power_limit_w < card.power_default_w]:
        card = capped[0]
        return warn(f"{_where(capped)}: {card.power_limit_w:.0f} W of {card.power_default_w:.0f} W are allowed")
    return ok(f"{min(card.power_limit_w for card in known):.0f} W")


def _where(cards: Iterable[Card], of: Callable[[Card], object] = lambda card: True) -> str:
    """Cards by index, in words; empty if there are none."""
    indices = [str(card.index) for card in cards if of(card)]
    return f"card{'s' * (len(indices) > 1)} {', '.join(indices)}" if indices else ""


CHECKS = {
    "AMP201": _cards,
    "AMP202": _capability,
    "AMP203": _equal,
    "AMP204": _used,
    "AMP205": _sound,
    "AMP206": _whole,
    "AMP207": _link,
    "AMP208": _reach,
    "AMP209": _nvlink,
    "AMP210": _persistence,
    "AMP211": _power,
}
