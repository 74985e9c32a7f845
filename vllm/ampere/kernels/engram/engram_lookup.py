# SPDX-License-Identifier: Apache-2.0
"""Read rows of the engram table and decode them to bfloat16.

The table is sharded by hash column, so a rank owns a range of rows and writes zero for the others'.
Upstream's kernel reads a float8_e4m3fn pointer, which SM80 cannot compile; here the table is bytes.

A Triton program owns sixteen (token, column) pairs at a time, and goes on to others: a fixed number of programs keeps
more rows in flight than a host link needs, and leaves the other processors' slots to what runs beside it. The table may
lie in host memory that the card maps: rows of other ranks are not read. Many pairs are read in the table's order, so that
neighbours share the translation of an address. See docs/en/kernels/engram.md.
"""

import functools

import torch

from ...cache_layout import ENGRAM_DIM, ENGRAM_SCALES
from ...errors import ContractError
from ...testing.inputs import integers
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..quantization.triton_codec import e4m3_to_float, ue8m0_to_float
from ..registry import EXACT, Case, Implementation, Op
from .reference import engram_lookup_ref

_ROWS, _WARPS = 16, 4
# 128 programs of 16 rows of 264 bytes: 540 KB in flight, ten times what 25 GB/s and 2 us of latency ask for.
_PROGRAMS = 128
# Below, sorting costs more launches than it saves.
_SORTED_FROM = 4096


@triton.jit(
    do_not_specialize=["stride_rows_tok", "stride_rows_col", "first_row", "end_row", "count"],
    do_not_specialize_on_alignment=["rows_ptr"],
)
def _engram_lookup_kernel(
    table_ptr, scales_ptr, rows_ptr, order_ptr, out_ptr, stride_rows_tok, stride_rows_col, stride_out_tok, stride_out_col,
    first_row, end_row, count,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    d, group = tl.arange(0, DIM)[None, :], tl.arange(0, GROUPS)[None, :]
    for base in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        place = base + tl.arange(0, ROWS)
        at = tl.load(order_ptr + place, place < count, other=count)
        token, column = at // COLUMNS, at % COLUMNS
        row = tl.load(rows_ptr + token * stride_rows_tok + column * stride_rows_col, at < count, other=-1).to(tl.int64)
        own = (at < count) & (row >= first_row) & (row < end_row)
        local = tl.where(own, row - first_row, 0)[:, None]
        codes = tl.load(table_ptr + local * DIM + d, own[:, None], other=0)
        scale = ue8m0_to_float(tl.load(scales_ptr + local * GROUPS + group, own[:, None], other=0))
        values = tl.reshape(e4m3_to_float(codes), (ROWS, GROUPS, DIM // GROUPS)) * scale[:, :, None]
        out = tl.reshape(values, (ROWS, DIM)).to(tl.bfloat16)
        tl.store(out_ptr + (token * stride_out_tok + column * stride_out_col)[:, None] + d, out, (at < count)[:, None])


@functools.cache
def _given_order(device: torch.device) -> torch.Tensor:
    """Kept: a captured graph reads it."""
    return torch.arange(_SORTED_FROM, device=device)


def _engram_lookup_triton(table, scales, rows, first_row, end_row, out=None):
    given, count = _given_order(rows.device), rows.numel()
    order = rows.flatten().argsort() if count >= _SORTED_FROM else given
    return look_up(table, scales, rows, first_row, end_row, out, order)


def look_up(table, scales, rows, first_row, end_row, out, order) -> torch.Tensor:
    """`engram_lookup` of the pairs in a given order, int64 [at least T * C], a permutation of the first T * C."""
    if out is None:
        out = torch.empty(*rows.shape, ENGRAM_DIM, dtype=torch.bfloat16, device=rows.device)
    count = rows.numel()
    if count:
        _engram_lookup_kernel[(min(triton.cdiv(count, _ROWS), _PROGRAMS),)](
            table, scales, rows, order, out, *rows.stride(), out.stride(0), out.stride(1), first_row, end_row, count,
            COLUMNS=rows.shape[1], DIM=ENGRAM_DIM, GROUPS=ENGRAM_SCALES, ROWS=_ROWS, num_warps=_WARPS,
        )  # fmt: skip
    return out


COMPILES = tuple(
    Launch(
        _engram_lookup_kernel,
        {
            "table_ptr": "*u8:16", "scales_ptr": "*u8:16", "rows_ptr": f"*{integer}", "order_ptr": "*i64:16",
            "out_ptr": "*bf16:16",
            "stride_rows_tok": "i32", "stride_rows_col": "i32", "stride_out_tok": "i32:16", "stride_out_col": "i32:16",
            "first_row": "i32", "end_row": "i32", "count": "i32",
        },
        {"COLUMNS": 24, "DIM": ENGRAM_DIM, "GROUPS": ENGRAM_SCALES, "ROWS": _ROWS},
        num_warps=_WARPS,
    )
    for integer in ("i32", "i64")
)


def engram_lookup(
    table: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    first_row: int,
    end_row: int,
    out: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Decode the table rows a token hashes to, zero where another rank owns the row.

    Axes: R rows of this rank, T tokens, C hash columns of this rank.

    Args:
        table: uint8 [R, 256], E4M3 codes; row 0 is row `first_row` of the whole table.
        scales: uint8 [R, 8], UE8M0, one for 32 values.
        rows: int32 or int64 [T, C], rows of the whole table; any value, also negative.
        first_row: first row of this rank.
        end_row: one past its last row, at most first_row + R.
        out: bfloat16 [T, C, 256], written; None: newly allocated.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, C, 256], `out` if it was given; zero where a row is outside [first_row, end_row).

    Numerics: exact for scale bytes 10 to 246, where every product is a normal bfloat16. Byte 0 decodes to a factor
    of 0, byte 255 to infinity; the released table holds neither.
    Graph safety: allocates its result unless it is given, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a range longer than the table.
    Source: model_spec section 8; replaces `_engram_lookup_kernel`.
    """
    axes = OP.check(table=table, scales=scales, rows=rows, out=out)
    if not 0 <= end_row - first_row <= axes["R"]:
        raise ContractError(f"engram_lookup: rows {first_row} to {end_row} do not fit a table of {axes['R']} rows")
    return OP.choose(rows.device, implementation)(table, scales, rows, first_row, end_row, out)


def _inputs(sizes, generator, device):
    count, first = sizes["R"], 1000
    low, high = first - count // 2, first + count + count // 2
    codes = integers(generator, 0, 256, count, ENGRAM_DIM)
    codes = torch.where(codes % 128 == 127, 0, codes)
    return {
        "table": codes.to(device=device, dtype=torch.uint8),
        "scales": integers(generator, 110, 135, count, ENGRAM_SCALES, dtype=torch.uint8, device=device),
        "rows": integers(generator, low, high, sizes["T"], sizes["C"], device=device),
        "first_row": first,
        "end_row": first + count,
    }


OP = Op(
    name="engram_lookup",
    summary="Read rows of the engram table and decode them to bfloat16.",
    axes={"R": "table rows of this rank", "T": "tokens", "C": "hash columns of this rank"},
    inputs=(
        Arg("table", "R 256", (torch.uint8,), contiguous="full"),
        Arg("scales", "R 8", (torch.uint8,), contiguous="full"),
        Arg("rows", "T C", (torch.int64, torch.int32), contiguous="any"),
        Arg("out", "T C 256", (torch.bfloat16,), optional=True),
    ),
    outputs=(Arg("embedding", "T C 256", (torch.bfloat16,)),),
    reference=engram_lookup_ref,
    implementations=(Implementation("triton", _engram_lookup_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"embedding": EXACT},
    cases=tuple(
        Case(f"t{t}_c{c}_r{r}", {"T": t, "C": c, "R": r}, _inputs)
        for t, c, r in ((0, 24, 50), (1, 24, 500), (67, 3, 999), (101, 24, 700))
    ),
    bytes_moved=lambda s: s["T"] * s["C"] * (8 + 264 + 512),
    flops=lambda s: s["T"] * s["C"] * ENGRAM_DIM,
    replaces="vllm.models.deepseek_v41.common.engram._engram_lookup_kernel",
    source="8",
)
