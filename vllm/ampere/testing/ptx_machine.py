# SPDX-License-Identifier: Apache-2.0
"""Run a compiled kernel on the CPU: PTX, one block at a time, its threads in step.

Triton's interpreter runs a kernel's Python; this runs what the compiler made of it for sm_80, layouts, barriers and
asynchronous copies included, so that a kernel can be tested without a card where no interpreter exists (Gluon). It knows
the instructions that our kernels are compiled to, and raises on others.

A wrong kernel often gives the right numbers when threads run in step, so the machine is strict where a card is not:
an access outside the given tensors, a read of shared memory that was never written, and two warps that touch the same
shared bytes without a barrier between them, one of them writing, raise `MachineFault`. A `cp.async` counts as writing from
its issue until its group is waited for, and its bytes arrive at the wait only.
"""

import functools
import re
from dataclasses import dataclass, field

import numpy as np
import torch

from .ptx_instructions import HANDLERS

# Far apart, so that an address of one space is none of the other.
_SHARED_BASE = 0x1000
_GLOBAL_BASE = 1 << 32
# Bytes that are watched together.
_PAIR = 2


class MachineFault(Exception):
    """The kernel did what a card may answer with anything, or the machine does not know an instruction."""


@dataclass
class Instruction:
    """One line: `@guard opcode operands`."""

    text: str
    guard: str
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


class GlobalMemory:
    """The storages of tensors in one array of bytes, with gaps between them that may not be touched."""

    def __init__(self):
        self.bytes = np.zeros(256, np.uint8)
        self.ours = np.zeros(256, bool)
        self._placed: list[tuple[torch.UntypedStorage, int]] = []

    def place(self, tensor: torch.Tensor) -> int:
        """The address of a CPU tensor's first element; tensors of one storage keep their distance."""
        storage = tensor.untyped_storage()
        for placed, base in self._placed:
            if placed.data_ptr() == storage.data_ptr():
                break
        else:
            base, size = len(self.bytes), storage.nbytes()
            room = -(-size // 256) * 256 + 256
            self.bytes = np.concatenate([self.bytes, np.zeros(room, np.uint8)])
            self.ours = np.concatenate([self.ours, np.arange(room) < size])
            self.bytes[base : base + size] = _storage_bytes(storage)
            self._placed.append((storage, base))
        return _GLOBAL_BASE + base + tensor.storage_offset() * tensor.element_size()

    def store_back(self) -> None:
        """Give every tensor the bytes that the kernel left."""
        for storage, base in self._placed:
            _storage_bytes(storage)[:] = self.bytes[base : base + storage.nbytes()]


def _storage_bytes(storage: torch.UntypedStorage) -> np.ndarray:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


@dataclass
class SharedMemory:
    """A block's shared bytes, and who touched each pair of them since the last barrier."""

    size: int
    epoch: int = 1
    bytes: np.ndarray = field(init=False)

    def __post_init__(self):
        self.bytes = np.full(self.size, 0xFF, np.uint8)
        units = self.size // _PAIR
        self.written = np.zeros(units, bool)
        self.pending = np.zeros(units, np.int32)
        self.write_epoch, self.write_warp = np.zeros(units, np.int64), np.zeros(units, np.int64)
        self.read_epoch, self.readers = np.zeros(units, np.int64), np.zeros(units, np.int64)
        self.groups: list[list[tuple]] = []
        self.open_group: list[tuple] = []

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Indices of the bytes of accesses, [accesses, size]."""
        first = addresses.astype(np.int64) - _SHARED_BASE
        if len(first) and (first.min() < 0 or first.max() + size > self.size):
            raise MachineFault(f"shared memory has {self.size} bytes, an access of {size} is at {first.min()} to {first.max()}")
        return first[:, None] + np.arange(size)

    def read(self, addresses: np.ndarray, warps: np.ndarray, size: int) -> np.ndarray:
        """Bytes [accesses, size]."""
        places = self.places(addresses, size)
        units, warps = _pairs(places, warps)
        if not self.written[units].all():
            raise MachineFault("shared memory is read that was never written")
        if self.pending[units].any():
            raise MachineFault("shared memory is read that an asynchronous copy may still write")
        if ((self.write_epoch[units] == self.epoch) & (self.write_warp[units] != warps)).any():
            raise MachineFault("shared memory is read that another warp wrote, without a barrier between")
        stale = units[self.read_epoch[units] != self.epoch]
        self.readers[stale] = 0
        self.read_epoch[units] = self.epoch
        np.bitwise_or.at(self.readers, units, 1 << warps)
        return self.bytes[places]

    def _claim(self, units: np.ndarray, warps: np.ndarray) -> None:
        """The checks that every write needs."""
        others = self.readers[units] & ~(1 << warps)
        if ((self.read_epoch[units] == self.epoch) & (others != 0)).any():
            raise MachineFault("shared memory is written that another warp read, without a barrier between")
        if self.pending[units].any():
            raise MachineFault("shared memory is written that an asynchronous copy may still write")

    def _put(self, places: np.ndarray, warps: np.ndarray, values: np.ndarray) -> None:
        units, warps = _pairs(places, warps)
        self.bytes[places] = values
        self.written[units] = True
        self.write_epoch[units], self.write_warp[units] = self.epoch, warps

    def write(self, addresses: np.ndarray, warps: np.ndarray, values: np.ndarray) -> None:
        """Store bytes [accesses, size]."""
        places = self.places(addresses, values.shape[1])
        units, wide = _pairs(places, warps)
        self._claim(units, wide)
        raced = (self.write_epoch[units] == self.epoch) & (self.write_warp[units] != wide)
        if raced.any() and (self.bytes[places] != values)[raced.any(1)].any():
            raise MachineFault("shared memory is written by two warps, without a barrier between")
        self._put(places, warps, values)

    def copy_later(self, addresses: np.ndarray, warps: np.ndarray, values: np.ndarray) -> None:
        """A `cp.async` of bytes [accesses, size]."""
        places = self.places(addresses, values.shape[1])
        units, wide = _pairs(places, warps)
        self._claim(units, wide)
        if ((self.write_epoch[units] == self.epoch) & (self.write_warp[units] != wide)).any():
            raise MachineFault("an asynchronous copy writes what another warp wrote, without a barrier between")
        self.pending[units] += 1
        self.open_group.append((places, warps, values))

    def commit(self) -> None:
        """Close the group of asynchronous copies."""
        self.groups.append(self.open_group)
        self.open_group = []

    def wait(self, outstanding: int) -> None:
        """Let all but the last `outstanding` groups arrive."""
        while len(self.groups) > outstanding:
            for places, warps, values in self.groups.pop(0):
                self.pending[_pairs(places, warps)[0]] -= 1
                self._put(places, warps, values)


def _pairs(places: np.ndarray, warps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pairs of bytes below accesses at bytes [accesses, size], each one's warp): [accesses, pairs] both."""
    units = places[:, ::_PAIR] // _PAIR
    return units, np.broadcast_to(warps[:, None], units.shape)


class Block:
    """The state of one block: registers by name, each with a value a thread; parameters by name, each a type and a value."""

    def __init__(self, threads: int, place: tuple, grid: tuple, parameters: dict, memory: GlobalMemory, shared_bytes: int):
        self.threads, self.parameters = threads, parameters
        self.everyone = np.ones(threads, bool)
        self.warp = np.arange(threads) // 32
        self.memory, self.shared = memory, SharedMemory(shared_bytes)
        self.registers: dict[str, np.ndarray] = {}
        thread = np.arange(threads, dtype=np.uint32)
        self.special = {"%tid.x": thread, "%tid.y": thread * 0, "%tid.z": thread * 0, "%laneid": thread % 32}
        for axis, here, size in zip("xyz", place, grid):
            self.special[f"%ctaid.{axis}"] = np.full(threads, here, np.uint32)
            self.special[f"%nctaid.{axis}"] = np.full(threads, size, np.uint32)
        self.special["global_smem"] = np.full(threads, _SHARED_BASE, np.uint64)

    def load(self, space: str, addresses: np.ndarray, active: np.ndarray, size: int) -> np.ndarray:
        """Bytes [threads, size]; of threads that are not active, zero."""
        found = np.zeros((self.threads, size), np.uint8)
        if not active.any():
            return found
        if space.startswith("shared"):
            found[active] = self.shared.read(addresses[active], self.warp[active], size)
        else:
            places = self.places(addresses[active], size)
            found[active] = self.memory.bytes[places]
        return found

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Indices of global bytes, all inside the tensors that were given, each access aligned."""
        if (addresses % np.uint64(size)).any():
            raise MachineFault(f"an access of {size} bytes is not aligned")
        places = (addresses.astype(np.int64) - _GLOBAL_BASE)[:, None] + np.arange(size)
        if places.min() < 0 or places.max() >= len(self.memory.bytes) or not self.memory.ours[places].all():
            raise MachineFault("global memory outside the given tensors is touched")
        return places

    def store(self, space: str, addresses: np.ndarray, active: np.ndarray, values: np.ndarray) -> None:
        """Store bytes [threads, size] of the active threads."""
        if not active.any():
            return
        if space.startswith("shared"):
            self.shared.write(addresses[active], self.warp[active], values[active])
        else:
            self.memory.bytes[self.places(addresses[active], values.shape[1])] = values[active]


@functools.cache
def parse(ptx: str) -> tuple[list[str], list[Instruction], dict[str, int]]:
    """(types of the parameters, instructions, label to index) of a module with one kernel."""
    head, body = ptx.split(".visible .entry", 1)[1].split("\n{", 1)
    parameters = re.findall(r"\.param \.(\w+)", head)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.sub(r"//[^\n]*", "", body).split("\n"):
        line = line.strip()
        if line.startswith("}"):
            break
        if named := re.match(r"(\$?[\w$]+):$", line):
            labels[named[1]] = len(instructions)
        elif line and not line.startswith("."):
            guard, opcode, rest = re.match(r"(?:@(!?%p\d+)\s+)?([\w.:]+)\s*(.*?);?$", line).groups()
            operands = tuple(o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest))
            instructions.append(Instruction(line, guard or "", tuple(opcode.split(".")), operands))
    return parameters, instructions, labels


def run(ptx: str, grid: tuple[int, ...], arguments: list, *, shared_bytes: int) -> int:
    """Run a kernel over its grid, one block after the other, and give its tensors what it wrote.

    Args:
        ptx: of one kernel for sm_80 or sm_86.
        grid: at most three sizes.
        arguments: what the kernel takes at run time, in its order: CPU tensors, ints and floats.
        shared_bytes: dynamic shared memory of a block.

    Returns: how many instructions the blocks ran, each counted once for all threads.
    Raises:
        MachineFault: a race, an access outside the tensors or an unknown instruction; the message has the line.
    """
    types, instructions, labels = parse(ptx)
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    memory = GlobalMemory()
    # Two pointers of Triton's own follow, to scratch that these kernels have none of.
    values = [memory.place(a) if isinstance(a, torch.Tensor) else a for a in arguments] + [0, 0]
    if len(values) != len(types):
        raise MachineFault(f"the kernel takes {len(types) - 2} arguments, {len(arguments)} are given")
    parameters = {f"param_{i}": (kind, value) for i, (kind, value) in enumerate(zip(types, values))}
    sizes = (*grid, 1, 1)[:3]
    count = 0
    for place in np.ndindex(*sizes[::-1]):
        block = Block(threads, place[::-1], sizes, parameters, memory, shared_bytes)
        with np.errstate(all="ignore"):
            count += _run_block(block, instructions, labels)
    memory.store_back()
    return count


def _run_block(block: Block, instructions: list[Instruction], labels: dict[str, int]) -> int:
    at = count = 0
    while True:
        here = instructions[at]
        at, count = at + 1, count + 1
        active = block.everyone
        if here.guard:
            active = block.registers[here.guard.lstrip("!")] ^ here.guard.startswith("!")
        if here.opcode[0] == "ret" and active.all():
            return count
        if here.opcode[0] == "bra":
            if active.any() != active.all():
                raise MachineFault(f"threads part at {here.text}")
            if active.any():
                at = labels[here.operands[0]]
            continue
        handler = HANDLERS.get(here.opcode[0])
        try:
            if handler is None:
                raise MachineFault("an instruction that the machine does not know")
            handler(block, here, active)
        except (MachineFault, KeyError, ValueError, StopIteration, NotImplementedError) as fault:
            raise MachineFault(f"{fault}: {here.text}") from fault
