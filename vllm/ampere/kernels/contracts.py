# SPDX-License-Identifier: Apache-2.0
"""What an op expects of its arguments, declared as data and checked before every call."""

import functools
from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple

import torch

from ..errors import ContractError


@dataclass(frozen=True)
class Arg:
    """One tensor argument or result.

    Attributes:
        name: the argument's name in the public function.
        shape: one word per dimension: an axis name ("T"), a number ("512"), or an axis with a factor
            ("2*I"); "..." alone accepts any shape. A name binds at its first use; later uses must agree.
        dtypes: accepted dtypes.
        optional: None is accepted.
        contiguous: "last" (default: stride 1 on the last dimension), "full", "any", "pages" (every
            dimension after the first is dense; the first may step over other pages of a packed block), or
            "word pages" (each of them starts at a multiple of 4 bytes).
    """

    name: str
    shape: str
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    contiguous: str = "last"

    @functools.cached_property
    def axes(self) -> "tuple[_Axis, ...] | None":
        """The words of `shape`, read once: a check is made at every call. None accepts any shape."""
        return None if self.shape == "..." else tuple(_Axis.parse(word) for word in self.shape.split())


class _Axis(NamedTuple):
    """One word of a shape: a number, or `factor` times a named axis."""

    word: str
    number: int | None
    factor: int
    name: str

    @classmethod
    def parse(cls, word: str) -> "_Axis":
        factor, _, name = word.rpartition("*")
        return cls(word, int(name) if name.isdigit() else None, int(factor or 1), name)


def check(op: str, declared: tuple[Arg, ...], given: Mapping[str, Any]) -> dict[str, int]:
    """Check tensors against their declarations; return the size of every named axis.

    Args:
        op: name for the message.
        declared: the declarations; each name must be a key of `given`.
        given: argument name to tensor or None.

    Raises:
        ContractError: the first disagreement, in one line: dtype, rank, size, stride or device.
    """
    axes: dict[str, int] = {}
    device = None
    for arg in declared:
        tensor = given[arg.name]
        if tensor is None:
            if arg.optional:
                continue
            raise ContractError(f"{op}: {arg.name} is missing")
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(f"{op}: {arg.name} must be a tensor, not {type(tensor).__name__}")
        if tensor.dtype not in arg.dtypes:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in arg.dtypes)
            raise ContractError(f"{op}: {arg.name} is {str(tensor.dtype).removeprefix('torch.')}, must be {wanted}")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ContractError(f"{op}: {arg.name} is on {tensor.device}, the arguments before it on {device}")
        _bind_shape(op, arg, tensor, axes)
        _check_stride(op, arg, tensor)
    return axes


def _bind_shape(op: str, arg: Arg, tensor: torch.Tensor, axes: dict[str, int]) -> None:
    if arg.axes is None:
        return
    shape = tensor.shape
    if len(shape) != len(arg.axes):
        words = ", ".join(axis.word for axis in arg.axes)
        raise ContractError(f"{op}: {arg.name} has shape {list(shape)}, must be [{words}]")
    for (word, wanted, factor, name), size in zip(arg.axes, shape):
        if wanted is None:
            if name in axes:
                wanted = axes[name] * factor
            elif size % factor:
                raise ContractError(f"{op}: {arg.name} has {size} on axis {word}, must be a multiple of {factor}")
            else:
                axes[name] = size // factor
                continue
        if size != wanted:
            raise ContractError(f"{op}: {arg.name} has {size} on axis {word}, must be {wanted}")


def _check_stride(op: str, arg: Arg, tensor: torch.Tensor) -> None:
    if arg.contiguous == "any" or tensor.numel() == 0:
        return
    if arg.contiguous == "full" and not tensor.is_contiguous():
        raise ContractError(f"{op}: {arg.name} must be contiguous, has strides {list(tensor.stride())}")
    if arg.contiguous == "word pages" and (tensor.data_ptr() % 4 or tensor.stride(0) % 4):
        raise ContractError(f"{op}: each page of {arg.name} must start at a multiple of 4 bytes")
    if arg.contiguous.endswith("pages") and not _dense_pages(tensor.shape, tensor.stride()):
        raise ContractError(f"{op}: each page of {arg.name} must be dense, has strides {list(tensor.stride())}")
    if arg.contiguous == "last" and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ContractError(f"{op}: the last dimension of {arg.name} must be contiguous, has stride {tensor.stride(-1)}")


def _dense_pages(shape, strides) -> bool:
    page = 1
    for size, stride in zip(shape[:0:-1], strides[:0:-1]):
        if size > 1 and stride != page:
            return False
        page *= size
    return shape[0] == 1 or strides[0] >= page
