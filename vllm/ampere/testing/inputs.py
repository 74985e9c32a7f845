# SPDX-License-Identifier: Apache-2.0
"""Random inputs that cases, tests and benchmarks share."""

import torch

from ..cache_layout import KV_GROUPS, KV_RECORD, NOPE_DIM, ROPE_DIM


def normal(generator: torch.Generator, *shape: int, dtype=torch.bfloat16, device="cpu", scale: float = 1.0) -> torch.Tensor:
    """Normal values; drawn on the CPU so that every device sees the same numbers."""
    return (torch.randn(*shape, generator=generator) * scale).to(device=device, dtype=dtype)


def integers(generator: torch.Generator, low: int, high: int, *shape: int, dtype=torch.int64, device="cpu") -> torch.Tensor:
    """Uniform integers in [low, high)."""
    return torch.randint(low, high, shape, generator=generator).to(device=device, dtype=dtype)


def ascending_lists(generator: torch.Generator, counts: torch.Tensor, limit: int, width: int) -> torch.Tensor:
    """int32 [T, width]: of each row, `counts` [T] numbers below `limit` (or all of them), ascending, then -1."""
    drawn = torch.rand(len(counts), limit, generator=generator).argsort(1)[:, :width]
    drawn = torch.where(torch.arange(drawn.shape[1]) < counts[:, None], drawn, limit).sort(1).values
    drawn = torch.nn.functional.pad(drawn, (0, width - drawn.shape[1]), value=limit)
    return torch.where(drawn < limit, drawn, -1).int()


def rope_table(length: int, dim: int = 64, base: float = 10000.0, device="cpu") -> torch.Tensor:
    """float32 [length, dim]: cosines then sines of position * base^(-2i/dim)."""
    angle = torch.outer(torch.arange(length).double(), base ** (-torch.arange(0, dim, 2).double() / dim))
    return torch.cat([angle.cos(), angle.sin()], -1).float().to(device)


def kv_pages(generator: torch.Generator, pages: int, page_rows: int, stride_bytes: int | None = None, device="cpu") -> torch.Tensor:
    """A latent cache as vLLM binds one: uint8 [pages, page_rows, 584], pages inside packed blocks.

    Every row holds values of about unit size, save page 0 (vLLM's null block) and the bytes between the
    pages, which are 0xff: NaN in each of the formats.

    Args:
        stride_bytes: distance between two pages; default is a block that holds one more page.
    """
    size = page_rows * KV_RECORD.row_bytes
    stride_bytes = stride_bytes or 2 * size
    block = torch.full((pages, stride_bytes), 0xFF, dtype=torch.uint8)
    codes = (torch.randn(pages, page_rows, NOPE_DIM, generator=generator) * 100).clamp(-448, 448)
    tail = torch.randn(pages, page_rows, ROPE_DIM, generator=generator).bfloat16()
    data = torch.cat([codes.to(torch.float8_e4m3fn).view(torch.uint8), tail.view(torch.uint8)], -1)
    scales = torch.randint(118, 123, (pages, page_rows, KV_RECORD.scale_bytes), generator=generator, dtype=torch.uint8)
    scales[..., KV_GROUPS:] = 0
    first_scale = KV_RECORD.scale_offset(0, page_rows)
    block[1:, :first_scale] = data[1:].flatten(1)
    block[1:, first_scale:size] = scales[1:].flatten(1)
    shape, strides = (pages, page_rows, KV_RECORD.row_bytes), (stride_bytes, KV_RECORD.row_bytes, 1)
    return block.to(device).as_strided(shape, strides)


class _HostMemory:
    def __init__(self, pinned: torch.Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape), "typestr": "|u1", "data": (pinned.data_ptr(), False), "version": 3,
        }  # fmt: skip


def card_view(pinned: torch.Tensor, device: str | torch.device = "cuda") -> torch.Tensor:
    """Pinned host memory, dense uint8, as a tensor of the card, which reads it by the same address; `pinned` must live on."""
    return torch.as_tensor(_HostMemory(pinned), device=device)


def duplicate(given):
    """The same inputs in memory of their own: values, strides and what shares a storage stay.

    Args:
        given: tensors, in dicts, lists and tuples of any depth; anything else is handed on as it is.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(value):
        if isinstance(value, dict):
            return {name: copy(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(copy(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        copied = storages[storage.data_ptr()]
        return value.new_empty(0).set_(copied, value.storage_offset(), value.shape, value.stride())

    return copy(given)
