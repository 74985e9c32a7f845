# SPDX-License-Identifier: Apache-2.0
"""Read rows of the latent cache back as numbers: a request's last rows, or rows by slot.

Prefill reads rows gathered here; decode reads the 584-byte pages directly. E4M3 times a power of two has four
significant bits, so bfloat16 holds it exactly.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import kv_pages
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import EXACT, Case, Implementation, Op
from ..triton_slots import page_slots
from .reference import gather_dequant_ref, gather_dequant_slots_ref
from .triton_record import copy_numbers, record_pointers
from .window_insert import CACHE

_ROWS = 16
_MAX_PROGRAMS = 8192


_LISTS = ("seq_lens_ptr", "gather_lens_ptr", "table_ptr")


@triton.jit(do_not_specialize=["offset", "out_rows", "stride_table_req"], do_not_specialize_on_alignment=_LISTS)
def _gather_dequant_kernel(
    cache_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    table_ptr,
    out_ptr,
    stride_page,
    stride_table_req,
    stride_out_req,
    stride_out_row,
    page_rows,
    offset,
    out_rows,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The programs of a request take its tiles of `ROWS` rows in turn, as many as its length calls for."""
    request = tl.program_id(0).to(tl.int64)
    end = tl.load(seq_lens_ptr + request)
    length = end if WHOLE else tl.load(gather_lens_ptr + request)
    out_ptr += request * stride_out_req
    table_ptr += request * stride_table_req
    for first in range(tl.program_id(1) * ROWS, length, tl.num_programs(1) * ROWS):
        offs = first + tl.arange(0, ROWS)
        counts = (offs < length) & (offset + offs < out_rows)
        slots = tl.maximum(page_slots(table_ptr, end - length + offs, counts, page_rows), 0)
        data_ptr, scale_ptr = record_pointers(cache_ptr, slots, stride_page, page_rows)
        row_ptr = out_ptr + (offset + offs).to(tl.int64) * stride_out_row
        copy_numbers(row_ptr, data_ptr, scale_ptr, counts, counts, ROWS)


@triton.jit(do_not_specialize=["count"])
def _gather_dequant_slots_kernel(cache_ptr, slots_ptr, rows_ptr, stride_page, page_rows, count, ROWS: tl.constexpr):
    """One program owns `ROWS` slots; `rows_ptr` is dense."""
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(slots_ptr + offs, mask=offs < count, other=-1)
    data_ptr, scale_ptr = record_pointers(cache_ptr, tl.maximum(slots, 0), stride_page, page_rows)
    copy_numbers(rows_ptr + offs * 512, data_ptr, scale_ptr, slots >= 0, offs < count, ROWS)


def _gather_dequant_triton(cache, seq_lens, gather_lens, block_table, out, offset):
    requests, out_rows, _ = out.shape
    if requests and out_rows > offset:
        programs = min(triton.cdiv(out_rows - offset, _ROWS), max(1, _MAX_PROGRAMS // requests))
        _gather_dequant_kernel[(requests, programs)](
            cache,
            seq_lens,
            seq_lens if gather_lens is None else gather_lens,
            block_table,
            out,
            cache.stride(0),
            block_table.stride(0),
            *out.stride()[:2],
            cache.shape[1],
            offset,
            out_rows,
            WHOLE=gather_lens is None,
            ROWS=_ROWS,
        )


def _gather_dequant_slots_triton(cache, slots, dtype=torch.float32):
    rows = torch.empty(len(slots), 512, dtype=dtype, device=cache.device)
    if count := len(slots):
        _gather_dequant_slots_kernel[(triton.cdiv(count, _ROWS),)](
            cache, slots, rows, cache.stride(0), cache.shape[1], count, ROWS=_ROWS
        )
    return rows


_CACHE_TYPES = {"cache_ptr": "*u8:16", "stride_page": "i32:16", "page_rows": "i32:16"}
COMPILES = (
    *(
        Launch(
            _gather_dequant_kernel,
            {
                **_CACHE_TYPES,
                **dict.fromkeys(_LISTS, "*i32"),
                "out_ptr": "*bf16:16",
                "stride_table_req": "i32",
                "stride_out_req": "i32:16",
                "stride_out_row": "i32:16",
                "offset": "i32",
                "out_rows": "i32",
            },
            {"WHOLE": whole, "ROWS": _ROWS},
        )
        for whole in (False, True)
    ),
    *(
        Launch(
            _gather_dequant_slots_kernel,
            {**_CACHE_TYPES, "slots_ptr": "*i64:16", "rows_ptr": rows, "count": "i32"},
            {"ROWS": _ROWS},
        )
        for rows in ("*fp32:16", "*bf16:16")
    ),
)


def gather_dequant(
    cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    out: torch.Tensor,
    offset: int,
    *,
    implementation: str | None = None,
) -> None:
    """Copy the last rows of each request's sequence, dequantised, into a workspace.

    Axes: B pages, P rows a page, R requests, N pages a request at most, Q rows a request in the workspace.

    Args:
        cache: uint8 [B, P, 584], each page dense, pages `stride(0)` bytes apart.
        seq_lens: int32 [R], rows of the cache in each sequence (for a compressed cache: compressed rows).
        gather_lens: int32 [R], how many of the last rows to copy, each in [0, seq_lens]; None: all.
        block_table: int32 [R, N], pages; only those of copied rows are read.
        out: bfloat16 [R, Q, 512], any strides but the last, written in place.
        offset: rows, first row of `out` to write; offset + length <= Q.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        None. Rows [offset, offset + length) of each request hold its rows in sequence order; the others keep
        their content.

    Numerics: exact.
    Graph safety: allocates nothing, does not synchronise, depends on no host value but `offset`.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a negative offset.
    Source: model_spec section 12; upstream_gates sections 2.3 and 2.4; replaces `dequantize_and_gather_k_cache`.
    """
    PAGES.check(cache=cache, seq_lens=seq_lens, gather_lens=gather_lens, block_table=block_table, out=out)
    if not 0 <= offset <= out.shape[1]:
        raise ContractError(f"{PAGES.name}: offset is {offset}, must be in [0, {out.shape[1]}]")
    PAGES.choose(cache.device, implementation)(cache, seq_lens, gather_lens, block_table, out, offset)


def gather_dequant_slots(
    cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype = torch.float32, *, implementation: str | None = None
) -> torch.Tensor:
    """Read rows by slot, dequantised.

    Axes: B pages, P rows a page, N rows to read.

    Args:
        cache: uint8 [B, P, 584], each page dense, pages `stride(0)` bytes apart.
        slots: int64 [N], each below B*P; negative reads nothing.
        dtype: of the result, float32 or bfloat16.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        `dtype` [N, 512], newly allocated; zeros for a negative slot. A NaN code, or a group under scale byte
        255, reads as NaN or infinity; a group under scale byte 0 as zeros.

    Numerics: exact.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 12.
    """
    SLOTS.check(cache=cache, slots=slots)
    if dtype not in (torch.float32, torch.bfloat16):
        raise ContractError(f"{SLOTS.name}: dtype is {dtype}, must be torch.float32 or torch.bfloat16")
    return SLOTS.choose(cache.device, implementation)(cache, slots, dtype)


def _pages_inputs(sizes, generator, device):
    lengths, page_rows, tail = torch.tensor(sizes["lengths"], dtype=torch.int32), sizes["P"], sizes["tail"]
    width = 1 + int(lengths.max()) // page_rows if len(lengths) else 1
    pages = 1 + len(lengths) * width
    table = 1 + torch.randperm(pages - 1, generator=generator).view(len(lengths), width).int()
    gathered = lengths if tail is None else lengths.clamp_max(tail)
    rows = int(gathered.max()) + 3 if len(lengths) else 3
    return {
        "cache": kv_pages(generator, pages, page_rows, device=device),
        "seq_lens": lengths.to(device),
        "gather_lens": None if tail is None else gathered.to(device),
        "block_table": table.to(device),
        "out": torch.zeros(len(lengths), rows, 512, dtype=torch.bfloat16, device=device),
        "offset": 2,
    }


def _slots_inputs(sizes, generator, device):
    slots = torch.randint(sizes["P"], sizes["B"] * sizes["P"], (sizes["N"],), generator=generator)
    slots[torch.rand(sizes["N"], generator=generator) < 0.2] = -1
    return {"cache": kv_pages(generator, sizes["B"], sizes["P"], device=device), "slots": slots.to(device)}


PAGES = Op(
    name="gather_dequant",
    summary="Copy the last rows of each request's sequence, dequantised, into a workspace.",
    axes={
        "B": "pages",
        "P": "rows a page",
        "R": "requests",
        "N": "pages a request at most",
        "Q": "rows a request in the workspace",
    },
    inputs=(
        CACHE,
        Arg("seq_lens", "R", (torch.int32,)),
        Arg("gather_lens", "R", (torch.int32,), optional=True),
        Arg("block_table", "R N", (torch.int32,)),
        Arg("out", "R Q 512", (torch.bfloat16,)),
    ),
    outputs=(),
    reference=gather_dequant_ref,
    implementations=(Implementation("triton", _gather_dequant_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"out": EXACT},
    cases=(
        Case("empty", {"lengths": [], "P": 32, "tail": None}, _pages_inputs),
        Case("whole", {"lengths": [0, 1, 33, 64], "P": 32, "tail": None}, _pages_inputs),
        Case("tail", {"lengths": [300, 129, 5], "P": 128, "tail": 131}, _pages_inputs),
    ),
    bytes_moved=lambda s: sum(min(n, s["tail"] or n) for n in s["lengths"]) * (584 + 1024),
    flops=lambda s: sum(min(n, s["tail"] or n) for n in s["lengths"]) * 448,
    mutates=("out",),
    replaces="vllm.models.deepseek_v41.common.ops.cache_utils.dequantize_and_gather_k_cache",
    source="12",
)

SLOTS = Op(
    name="gather_dequant_slots",
    summary="Read rows of the latent cache by slot, dequantised.",
    axes={"B": "pages", "P": "rows a page", "N": "rows to read"},
    inputs=(CACHE, Arg("slots", "N", (torch.int64,))),
    outputs=(Arg("rows", "N 512", (torch.float32, torch.bfloat16)),),
    reference=gather_dequant_slots_ref,
    implementations=(Implementation("triton", _gather_dequant_slots_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"rows": EXACT},
    cases=tuple(Case(f"n{n}_p{p}", {"N": n, "B": 4, "P": p}, _slots_inputs) for n, p in ((0, 32), (1, 64), (129, 128))),
    bytes_moved=lambda s: s["N"] * (584 + 2048 + 8),
    flops=lambda s: s["N"] * 448,
    source="12",
)

OPS = (PAGES, SLOTS)
