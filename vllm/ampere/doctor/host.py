# SPDX-License-Identifier: Apache-2.0
"""Area 1: memory, limits and caches of the machine."""

import re
from pathlib import Path

from .case import Case
from .findings import Outcome, Unknown, fail, ok, warn
from .system import LAYERED

_GIB = 2**30
_MIB = 2**20
# One message queue of vLLM's is 240 MiB; NCCL adds some MiB for each pair of cards that meet through the host.
_SHARED_BYTES = _GIB
_SWAPPED_BYTES = _GIB
_LOCKED_BYTES = 64 * _MIB
# Compiled kernels, torch's and vLLM's caches of one version.
_CACHE_BYTES = 10 * _GIB
_LEAST_CACHE_BYTES = _GIB
_CACHES = {
    "TRITON_CACHE_DIR": "~/.triton/cache",
    "TILELANG_CACHE_DIR": "~/.tilelang/cache",
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
}


def _shared_memory(case: Case) -> Outcome:
    space = case.system.space("/dev/shm")
    seen = f"{_size(space.free_bytes)} of {_size(space.total_bytes)} are free in /dev/shm"
    return ok(seen) if space.free_bytes >= _SHARED_BYTES else fail(f"{seen}, {_size(_SHARED_BYTES)} are needed")


def _host_memory(case: Case) -> Outcome:
    tables, rounded = case.engram_bytes
    memory = case.system.memory
    if "MemTotal" not in memory or "MemAvailable" not in memory:
        raise Unknown("/proc/meminfo does not say how much memory there is")
    seen = (
        f"{_size(memory['MemAvailable'])} of {_size(memory['MemTotal'])} are available, the engram tables take "
        f"{_size(tables)} ({_size(rounded)} without use_thp)"
    )
    if memory["MemTotal"] < tables:
        return _too_little(case, seen)
    if memory["MemAvailable"] < tables:
        return warn(seen, "end what else runs here")
    return ok(seen)


def _too_little(case: Case, seen: str) -> Outcome:
    return fail(seen) if case.engram_on_every_node else warn(f"{seen}; right on a node that holds neither layer 1 nor 14")


def _group_limit(case: Case) -> Outcome:
    limit, (tables, rounded) = case.system.memory_limit_bytes, case.engram_bytes
    if limit is None:
        return ok("the control group has no memory limit")
    seen = f"the control group may use {_size(limit)}, the engram tables take {_size(tables)}"
    if limit < tables:
        return _too_little(case, seen)
    if limit < rounded:
        return warn(f"{seen}, and {_size(rounded)} without use_thp", "keep use_thp on, or raise the limit")
    return ok(seen)


def _locked_memory(case: Case) -> Outcome:
    limit = case.system.limit("Max locked memory")
    if limit is None:
        return ok("locked memory is unlimited")
    seen = f"{_size(limit)} may be locked"
    return ok(f"{seen}, which one node does not need") if case.nodes == 1 or limit >= _LOCKED_BYTES else fail(seen)


def _huge_pages(case: Case) -> Outcome:
    text = case.system.read("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    if not chosen:
        raise Unknown("transparent_hugepage/enabled names no choice")
    _, rounded = case.engram_bytes
    seen = f"transparent huge pages: {chosen[1]}"
    if chosen[1] != "never":
        return ok(seen)
    return warn(f"{seen}; with ordinary pages a table is pinned as a power of two, {_size(rounded)} in all")


def _memory_nodes(case: Case) -> Outcome:
    nodes = [name for name in case.system.names("/sys/devices/system/node") if re.fullmatch(r"node\d+", name)]
    if len(nodes) < 2:
        return ok("one memory node")
    sizes = {int(name[4:]): _node_bytes(case, name) for name in nodes}
    used = {_card_node(case, card.bus) for card in case.cards} - {-1}
    empty = sorted(node for node in used if not sizes.get(node))
    if empty:
        return warn(f"cards are at memory node {empty[0]}, which has no memory")
    least, most = min(sizes.values()), max(sizes.values())
    seen = f"{len(nodes)} memory nodes of {_size(least)} to {_size(most)}"
    return warn(seen) if least < most / 2 else ok(seen)


def _node_bytes(case: Case, name: str) -> int:
    found = re.search(r"MemTotal:\s+(\d+) kB", case.system.read(f"/sys/devices/system/node/{name}/meminfo"))
    return int(found[1]) * 1024 if found else 0


def _card_node(case: Case, bus: str) -> int:
    return int(case.system.read(f"/sys/bus/pci/devices/{bus}/numa_node"))


def _swap(case: Case) -> Outcome:
    memory = case.system.memory
    used = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    return warn(f"{_size(used)} are swapped out") if used > _SWAPPED_BYTES else ok(f"{_size(used)} are swapped out")


def _cache_room(case: Case) -> Outcome:
    rooms = {folder: case.system.space(_existing(case, folder)).free_bytes for folder in _cache_folders(case)}
    folder = min(rooms, key=rooms.__getitem__)
    seen = f"{_size(rooms[folder])} are free for the cache {folder}"
    if rooms[folder] < _LEAST_CACHE_BYTES:
        return fail(seen)
    return warn(seen) if rooms[folder] < _CACHE_BYTES else ok(seen)


def _cache_rights(case: Case) -> Outcome:
    for folder in _cache_folders(case):
        above = _existing(case, folder)
        if not case.system.writable(above):
            return fail(f"{above} cannot be written, so {folder} cannot either")
        if "noexec" in case.system.mount_of(above).options:
            return fail(f"{folder} is on a filesystem mounted noexec, so compiled kernels do not load from it")
    return ok(f"{', '.join(_cache_folders(case))} can be written")


def _cache_lasts(case: Case) -> Outcome | None:
    if not case.system.in_container:
        return None
    lost = [folder for folder in _cache_folders(case) if case.system.mount_of(folder).kind in (*LAYERED, "tmpfs")]
    return warn(f"lost with this container: {', '.join(lost)}") if lost else ok("the caches outlast this container")


def _cache_folders(case: Case) -> list[str]:
    variables = case.system.variables
    home = variables.get("HOME") or str(Path.home())
    named = (variables.get(name) or default.replace("~", home) for name, default in _CACHES.items())
    return [str(case.system.working_folder / folder) for folder in named]


def _existing(case: Case, folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    return next(str(path) for path in (Path(folder), *Path(folder).parents) if case.system.at(path).is_dir())


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


CHECKS = {
    "AMP101": _shared_memory,
    "AMP102": _host_memory,
    "AMP103": _group_limit,
    "AMP104": _locked_memory,
    "AMP105": _huge_pages,
    "AMP106": _memory_nodes,
    "AMP107": _swap,
    "AMP108": _cache_room,
    "AMP109": _cache_rights,
    "AMP110": _cache_lasts,
}
