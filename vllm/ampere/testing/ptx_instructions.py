# SPDX-License-Identifier: Apache-2.0
"""What each PTX instruction does, for `ptx_machine`.

A handler takes the block, the instruction and which threads are active. Registers hold bits, unsigned and as wide as
their names say; `_read` views them as the type that the instruction names. Semantics: NVIDIA's PTX ISA 8.8.
"""

import functools
import re
from typing import Any, Callable

import numpy as np

_TYPES = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16, "f16": np.float16,
    "bf16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32,
    "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f64": np.float64, "pred": np.bool_,
}  # fmt: skip
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BYTES = {dtype: np.dtype(dtype).itemsize for dtype in _TYPES.values()}
_WIDTHS = {"%p": np.bool_, "%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32}
_WIDER = {"u16": np.uint32, "s16": np.int32, "u32": np.uint64, "s32": np.int64}
_GROUP, _PAIR = np.arange(32) // 4, np.arange(32) % 4


@functools.cache
def _kind(opcode: tuple[str, ...]) -> str:
    return next(part for part in reversed(opcode) if part in _TYPES)


@functools.cache
def _width(name: str) -> type:
    return _WIDTHS[re.match(r"%[a-z]+", name)[0]]


def _read(block: Any, operand: str, dtype: type) -> np.ndarray:
    """An operand of every thread as `dtype`."""
    bits = block.registers.get(operand)
    if bits is None:
        if operand.startswith("!"):
            return ~_read(block, operand[1:], dtype)
        if operand not in block.special:
            return _immediate(operand, dtype, block.threads)
        bits = block.special[operand]
    if dtype is np.bool_:
        return bits
    return bits.astype(_UNSIGNED[_BYTES[dtype]], copy=False).view(dtype)


@functools.cache
def _immediate(operand: str, dtype: type, threads: int) -> np.ndarray:
    """A number of the text, a float by its bits; the same for every thread."""
    value = int(operand[2:], 16) if operand.startswith(("0f", "0d")) else int(operand.rstrip("U"), 0)
    bits = np.full(threads, value & (1 << 64) - 1, np.uint64)
    return bits != 0 if dtype is np.bool_ else bits.astype(_UNSIGNED[_BYTES[dtype]]).view(dtype)


def _write(block: Any, name: str, values: np.ndarray, active: np.ndarray) -> None:
    """Give a register the bits of `values` in the active threads; narrow ones are extended with zeros."""
    if name == "_":
        return
    width = _width(name)
    if width != np.bool_:
        values = np.ascontiguousarray(values).view(_UNSIGNED[values.dtype.itemsize]).astype(width)
    if active is not block.everyone:
        values = np.where(active, values, block.registers.get(name, np.zeros_like(values)))
    block.registers[name] = values


@functools.cache
def _members(operand: str) -> list[str]:
    return [part.strip() for part in operand.strip("{}").split(",")]


@functools.cache
def _base_and_offset(operand: str) -> tuple[str, np.uint64]:
    base, offset = re.match(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand).groups()
    return base, np.uint64(int(offset or "0", 0) & (1 << 64) - 1)


def _address(block: Any, operand: str) -> np.ndarray:
    base, offset = _base_and_offset(operand)
    return _read(block, base, np.uint64 if base.startswith("%rd") else np.uint32).astype(np.uint64) + offset


def _load(block, here, active):
    space, kind = here.opcode[1], _kind(here.opcode)
    size = np.dtype(_TYPES[kind]).itemsize
    if space == "param":
        declared, value = block.parameters[re.search(r"param_\d+", here.operands[1])[0]]
        whole = np.array([value], np.float32) if declared == "f32" else np.array([value & (2**64 - 1)], np.uint64)
        bits = whole.view(np.uint32) if declared == "f32" else whole.astype(_UNSIGNED[_TYPES[declared]().itemsize])
        found = bits.view(_TYPES["s" + declared[1:]]).astype(np.int64) if kind[0] == "s" else bits
        return _write(block, here.operands[0], np.broadcast_to(found, block.threads), active)
    names = _members(here.operands[0])
    found = block.load(space, _address(block, here.operands[1]), active, size * len(names))
    for i, name in enumerate(names):
        part = np.ascontiguousarray(found[:, i * size : (i + 1) * size]).view(_UNSIGNED[size])[:, 0]
        _write(block, name, part.view(_TYPES[kind]).astype(np.int64) if kind[0] == "s" else part, active)


def _store(block, here, active):
    kind = _kind(here.opcode)
    parts = [np.ascontiguousarray(_read(block, name, _TYPES[kind])) for name in _members(here.operands[1])]
    values = np.stack(parts, 1).view(np.uint8)
    block.store(here.opcode[1], _address(block, here.operands[0]), active, values)


def _move(block, here, active):
    target, source = here.operands
    kind = _kind(here.opcode)
    if source.startswith("{"):
        parts = [np.ascontiguousarray(_read(block, name, _width(name))) for name in _members(source)]
        return _write(block, target, np.stack(parts, 1).view(_TYPES[kind])[:, 0], active)
    value = _read(block, source, _TYPES[kind])
    if target.startswith("{"):
        names = _members(target)
        parts = np.array(value)[:, None].view(_UNSIGNED[value.itemsize // len(names)])
        for i, name in enumerate(names):
            _write(block, name, np.ascontiguousarray(parts[:, i]), active)
        return None
    return _write(block, target, value, active)


def _number(opcode: tuple[str, ...]) -> type:
    """The type that an instruction computes in, of those that NumPy has; of bfloat16 it would take the bits for an integer."""
    kind = _kind(opcode)
    if kind == "bf16":
        raise NotImplementedError("arithmetic of bfloat16")
    return _TYPES[kind]


def _elementwise(function: Callable) -> Callable:
    """A handler of `d = function(a, b, ...)` in the type that the opcode ends with."""

    def handle(block, here, active):
        dtype = _number(here.opcode)
        result = function(*(_read(block, operand, dtype) for operand in here.operands[1:]))
        _write(block, here.operands[0], result.astype(dtype), active)

    return handle


def _multiply(block, here, active):
    """mul and mad: .lo, .hi, .wide, and of floats."""
    kind = _kind(here.opcode)
    dtype = _number(here.opcode)
    a, b = (_read(block, operand, dtype) for operand in here.operands[1:3])
    if kind[0] == "f" or "lo" in here.opcode:
        product = a * b
    elif np.dtype(dtype).itemsize == 8:
        whole = [int(x) * int(y) for x, y in zip(a, b)]
        product = np.array([w >> 64 for w in whole], dtype)
    else:
        product = a.astype(_WIDER[kind]) * b.astype(_WIDER[kind])
        if "hi" in here.opcode:
            product = (product >> (8 * np.dtype(dtype).itemsize)).astype(dtype)
    if here.opcode[0] == "mad":
        product = product + _read(block, here.operands[3], product.dtype.type)
    _write(block, here.operands[0], product, active)


def _fused(block, here, active):
    """fma of float32, bfloat16, and two bfloat16 side by side."""
    kind = here.opcode[-1]
    if kind not in ("f32", "bf16", "bf16x2"):
        raise NotImplementedError("a fused product of another type")
    values = [_read(block, operand, _TYPES[{"bf16x2": "u32"}.get(kind, kind)]) for operand in here.operands[1:]]
    a, b, c = values if kind == "f32" else (from_bfloat16(np.ascontiguousarray(v).view(np.uint16)) for v in values)
    # In float64 the product is exact; the sum's second rounding is that of the result.
    result = (a.astype(np.float64) * b + c).astype(np.float32)
    if kind != "f32":
        result = to_bfloat16(result).view(values[0].dtype)
    _write(block, here.operands[0], result, active)


def _minimum(pick: Callable, pick_nan: Callable) -> Callable:
    plain, strict = _elementwise(pick), _elementwise(pick_nan)
    return lambda block, here, active: (strict if "NaN" in here.opcode else plain)(block, here, active)


def _shift(block, here, active):
    """shl and shr; a distance past the width gives zeros, or copies of the sign."""
    dtype = _TYPES[_kind(here.opcode)]
    value, distance = _read(block, here.operands[1], dtype), _read(block, here.operands[2], np.uint32)
    most = 8 * np.dtype(dtype).itemsize - 1
    bounded = np.minimum(distance, most).astype(dtype)
    shifted = value << bounded if here.opcode[0] == "shl" else value >> bounded
    if not (here.opcode[0] == "shr" and np.issubdtype(dtype, np.signedinteger)):
        shifted = np.where(distance > most, np.zeros_like(shifted), shifted)
    _write(block, here.operands[0], shifted, active)


def _funnel(block, here, active):
    low, high = (_read(block, o, np.uint32).astype(np.uint64) for o in here.operands[1:3])
    distance = _read(block, here.operands[3], np.uint32).astype(np.uint64) & np.uint64(31)
    both = high << np.uint64(32) | low
    result = both << distance >> np.uint64(32) if here.opcode[1] == "l" else both >> distance
    _write(block, here.operands[0], result.astype(np.uint32), active)


def _extract(block, here, active):
    """bfe: a field of bits, extended by its sign where the type is signed."""
    dtype = _TYPES[_kind(here.opcode)]
    value = _read(block, here.operands[1], dtype).astype(np.int64)
    start, length = (int(o, 0) for o in here.operands[2:])
    field = value >> start & (1 << length) - 1
    if np.issubdtype(dtype, np.signedinteger):
        field = np.where(field >> length - 1 & 1, field - (1 << length), field)
    _write(block, here.operands[0], field.astype(dtype), active)


def _permute(block, here, active):
    a, b, selector = (np.ascontiguousarray(_read(block, o, np.uint32)) for o in here.operands[1:])
    pool = np.stack([a, b], 1).view(np.uint8)
    choice = np.stack([selector >> 4 * i & 0xF for i in range(4)], 1)
    if (choice & 8).any():
        raise NotImplementedError("prmt that copies a sign")
    _write(block, here.operands[0], np.take_along_axis(pool, choice.astype(np.int64), 1).view(np.uint32)[:, 0], active)


def _logic(block, here, active):
    """lop3: any function of three bits, by its table."""
    a, b, c = (_read(block, o, np.uint32) for o in here.operands[1:4])
    table, result = int(here.operands[4], 0), np.zeros(block.threads, np.uint32)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    _write(block, here.operands[0], result, active)


_COMPARE = {
    "eq": np.equal, "ne": lambda a, b: ~((a == b) | (a != a) | (b != b)), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "neu": np.not_equal, "equ": lambda a, b: ~(a != b) | (a != a) | (b != b), "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _compare(block, here, active):
    dtype = _number(here.opcode)
    a, b = (_read(block, operand, dtype) for operand in here.operands[1:3])
    result = _COMPARE[here.opcode[1]](a, b)
    if len(here.operands) > 3:
        also = _read(block, here.operands[3], np.bool_)
        result = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[here.opcode[2]](result, also)
    _write(block, here.operands[0], result, active)


def _select(block, here, active):
    dtype = _TYPES[_kind(here.opcode)]
    a, b = (_read(block, operand, dtype) for operand in here.operands[1:3])
    _write(block, here.operands[0], np.where(_read(block, here.operands[3], np.bool_), a, b), active)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of float32 rounded to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _convert(block, here, active):
    source_kind = here.opcode[-1]
    target_kind = here.opcode[-2]
    values = [_read(block, operand, _TYPES[source_kind]) for operand in here.operands[1:]]
    if source_kind == "bf16":
        values = [from_bfloat16(v) for v in values]
    if target_kind in ("bf16", "bf16x2"):
        halves = [to_bfloat16(v).astype(np.uint32) for v in values]
        result = halves[0].astype(np.uint16) if target_kind == "bf16" else halves[0] << 16 | halves[1]
    elif target_kind == "f16x2":
        halves = [v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in values]
        result = halves[0] << 16 | halves[1]
    else:
        value = values[0]
        if np.issubdtype(value.dtype, np.floating) and target_kind[0] in "us":
            value = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[here.opcode[1]](value)
        result = value.astype(_TYPES[target_kind])
    _write(block, here.operands[0], result, active)


def _shuffle(block, here, active):
    """shfl.sync over whole warps."""
    value = _read(block, here.operands[1], np.uint32).reshape(-1, 32)
    amount = _read(block, here.operands[2], np.uint32).reshape(-1, 32).astype(np.int64)
    if int(here.operands[3], 0) & 0x1F00:
        raise NotImplementedError("a shuffle within parts of a warp")
    lane = np.arange(32)
    source = {"bfly": lane ^ amount, "idx": amount & 31, "down": lane + amount, "up": lane - amount}[here.opcode[2]]
    source = np.where((source < 0) | (source > 31), lane, source)
    _write(block, here.operands[0].split("|")[0], np.take_along_axis(value, source, 1).reshape(-1), active)


def _load_matrix(block, here, active):
    names = _members(here.operands[0])
    lanes = np.arange(block.threads) % 32 < 8 * len(names)
    rows = block.load("shared", _address(block, here.operands[1]), lanes & active, 16)
    tiles = rows.view(np.uint16).reshape(-1, 4, 8, 8)
    if "trans" in here.opcode:
        tiles = tiles.swapaxes(2, 3)
    for i, name in enumerate(names):
        pair = np.stack([tiles[:, i, _GROUP, 2 * _PAIR], tiles[:, i, _GROUP, 2 * _PAIR + 1]], -1)
        _write(block, name, np.ascontiguousarray(pair).view(np.uint32).reshape(-1), active)


def _multiply_matrices(block, here, active):
    """mma.sync m16n8k16 of bfloat16 or float16 with float32 sums."""
    if here.opcode[3:6] != ("m16n8k16", "row", "col") or here.opcode[6] != "f32" or not active.all():
        raise NotImplementedError("another product of matrices")
    number = from_bfloat16 if here.opcode[7] == "bf16" else lambda bits: bits.view(np.float16).astype(np.float32)

    def fragments(operand):
        words = np.stack([_read(block, name, np.uint32) for name in _members(operand)], -1)
        return number(words.view(np.uint16)).reshape(-1, 32, words.shape[-1], 2)

    a_words, b_words = fragments(here.operands[1]), fragments(here.operands[2])
    warps = len(a_words)
    a, b = np.empty((warps, 16, 16), np.float32), np.empty((warps, 16, 8), np.float32)
    for i in range(4):
        for j in range(2):
            a[:, _GROUP + 8 * (i % 2), 2 * _PAIR + 8 * (i // 2) + j] = a_words[:, :, i, j]
    for i in range(2):
        for j in range(2):
            b[:, 2 * _PAIR + 8 * i + j, _GROUP] = b_words[:, :, i, j]
    product = a @ b
    for i, (name, start) in enumerate(zip(_members(here.operands[0]), _members(here.operands[3]), strict=True)):
        part = product[:, _GROUP + 8 * (i // 2), 2 * _PAIR + i % 2].reshape(-1)
        _write(block, name, part + _read(block, start, np.float32), active)


def _copy_async(block, here, active):
    if here.opcode[2] == "commit_group":
        return block.shared.commit()
    if here.opcode[2] == "wait_group":
        return block.shared.wait(int(here.operands[0], 0))
    if here.opcode[2] not in ("cg", "ca"):
        raise NotImplementedError("another asynchronous copy")
    if not active.any():
        return None
    size = int(here.operands[2], 0)
    taken = _read(block, here.operands[3], np.uint32) if len(here.operands) > 3 else np.full(block.threads, size)
    if not np.isin(taken[active], (0, size)).all():
        raise NotImplementedError("an asynchronous copy of a part")
    values = block.load("global", _address(block, here.operands[1]), active & (taken == size), size)
    return block.shared.copy_later(_address(block, here.operands[0])[active], block.warp[active], values[active])


_UPDATES = {
    "add": lambda old, new: old + new, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "exch": lambda old, new: new,
}  # fmt: skip


def _atomic(block, here, active):
    """atom on global memory, one thread after the other."""
    dtype = _TYPES[_kind(here.opcode)]
    update = _UPDATES[next(part for part in here.opcode if part in _UPDATES)]
    if here.opcode[1] != "global":
        raise NotImplementedError("an atomic on other memory")
    addresses, given = _address(block, here.operands[1]), _read(block, here.operands[2], dtype)
    before = np.zeros(block.threads, dtype)
    for thread in np.flatnonzero(active):
        places = block.places(addresses[thread : thread + 1], _BYTES[dtype])[0]
        word = block.memory.bytes[places].view(dtype)
        before[thread] = word[0]
        block.memory.bytes[places] = update(word, given[thread : thread + 1]).astype(dtype).view(np.uint8)
    _write(block, here.operands[0], before, active)


def _barrier(block, here, active):
    if here.opcode[1] == "sync":
        block.shared.epoch += 1


def _reduce(block, here, active):
    """redux.sync: over each warp."""
    dtype = _TYPES[_kind(here.opcode)]
    value = _read(block, here.operands[1], dtype).reshape(-1, 32)
    reduced = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[here.opcode[2]]
    result = reduced.reduce(value, axis=1, dtype=dtype)
    _write(block, here.operands[0], np.repeat(result, 32), active)


def _remainder(a, b):
    """As in C: the sign is that of the dividend."""
    return np.fmod(a, np.where(b == 0, 1, b).astype(b.dtype))


def _quotient(a, b):
    """As in C: toward zero."""
    return a / b if np.issubdtype(a.dtype, np.floating) else (a - _remainder(a, b)) // np.where(b == 0, 1, b).astype(b.dtype)


HANDLERS: dict[str, Callable] = {
    "ld": _load, "st": _store, "mov": _move, "mul": _multiply, "mad": _multiply, "fma": _fused,
    "shl": _shift, "shr": _shift, "shf": _funnel, "bfe": _extract, "prmt": _permute, "lop3": _logic, "setp": _compare,
    "selp": _select, "cvt": _convert, "shfl": _shuffle, "ldmatrix": _load_matrix, "mma": _multiply_matrices,
    "cp": _copy_async, "bar": _barrier, "atom": _atomic, "redux": _reduce, "rem": _elementwise(_remainder),
    "add": _elementwise(np.add), "sub": _elementwise(np.subtract), "neg": _elementwise(np.negative),
    "and": _elementwise(np.bitwise_and), "or": _elementwise(np.bitwise_or), "xor": _elementwise(np.bitwise_xor),
    "not": _elementwise(np.invert), "abs": _elementwise(np.abs), "div": _elementwise(_quotient),
    "min": _minimum(np.fmin, np.minimum), "max": _minimum(np.fmax, np.maximum),
    "ex2": _elementwise(np.exp2), "lg2": _elementwise(np.log2), "rcp": _elementwise(lambda a: 1 / a),
    "sqrt": _elementwise(np.sqrt), "rsqrt": _elementwise(lambda a: 1 / np.sqrt(a)),
    "cvta": _move,
}  # fmt: skip
