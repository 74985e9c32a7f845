# SPDX-License-Identifier: Apache-2.0
"""Read rows of the engram table and decode them to bfloat16.

The table is sharded by hash column, so a rank owns a range of rows and writes zero for the others'.
Upstream's kernel reads a float8_e4m3fn pointer, which SM80 cannot compile; here the table is bytes.
"""

import torch

from ...cache_layout import ENGRAM_DIM, ENGRAM_SCALES
from ...errors import ContractError
from ...testing.inputs import integers
from ..contracts import Arg
from ..registry import EXACT, Case, Op
from .reference import engram_lookup_ref


def engram_lookup(
    table: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    first_row: int,
    end_row: int,
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
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, C, 256], newly allocated; zero where a row is outside [first_row, end_row).

    Numerics: exact for scale bytes 10 to 246, where every product is a normal bfloat16. Byte 0 decodes to a factor
    of 0, byte 255 to infinity; the released table holds neither.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a range longer than the table.
    Source: model_spec section 8; replaces `_engram_lookup_kernel`.
    """
    axes = OP.check(table=table, scales=scales, rows=rows)
    if not 0 <= end_row - first_row <= axes["R"]:
        raise ContractError(f"engram_lookup: rows {first_row} to {end_row} do not fit a table of {axes['R']} rows")
    return OP.choose(rows.device, implementation)(table, scales, rows, first_row, end_row)


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
    ),
    outputs=(Arg("embedding", "T C 256", (torch.bfloat16,)),),
    reference=engram_lookup_ref,
    tolerances={"embedding": EXACT},
    cases=tuple(
        Case(f"t{t}_c{c}_r{r}", {"T": t, "C": c, "R": r}, _inputs)
        for t, c, r in ((0, 24, 50), (1, 24, 500), (67, 3, 999))
    ),
    bytes_moved=lambda s: s["T"] * s["C"] * (8 + 264 + 512),
    flops=lambda s: s["T"] * s["C"] * ENGRAM_DIM,
    replaces="vllm.models.deepseek_v41.common.engram._engram_lookup_kernel",
    source="8",
)
