# SPDX-License-Identifier: Apache-2.0
"""Turn the indexer's rows, counted within a request, into slots of the compressed cache."""

import torch

from ...errors import ContractError
from ...testing.inputs import integers
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import EXACT, Case, Implementation, Op
from ..triton_slots import page_slots
from .reference import topk_slots_ref

_BLOCK_K = 512


@triton.jit(
    do_not_specialize=["stride_topk_tok", "stride_table_req", "width"],
    do_not_specialize_on_alignment=["topk_ptr", "request_ptr", "table_ptr", "positions_ptr"],
)
def _topk_slots_kernel(
    topk_ptr,
    request_ptr,
    table_ptr,
    positions_ptr,
    slots_ptr,
    lens_ptr,
    stride_topk_tok,
    stride_table_req,
    ratio,
    page_rows,
    width,
    BLOCK_K: tl.constexpr,
):
    """One program owns one token; `slots_ptr` is dense."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token)
    table_ptr += tl.maximum(request, 0).to(tl.int64) * stride_table_req
    visible = tl.where(request >= 0, (tl.load(positions_ptr + token) + 1) // ratio, 0)
    length = 0
    for first in range(0, width, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        row = tl.load(topk_ptr + token * stride_topk_tok + column, mask=column < width, other=-1)
        counts = (row >= 0) & (row < visible)
        slots = page_slots(table_ptr, row, counts, page_rows)
        tl.store(slots_ptr + token * width + column, slots, mask=column < width)
        length = tl.maximum(length, tl.max(tl.where(counts, column + 1, 0), 0))
    tl.store(lens_ptr + token, length)


def _topk_slots_triton(topk, request, block_table, positions, ratio, page_rows):
    tokens, width = topk.shape
    slots = torch.empty(tokens, width, dtype=torch.int32, device=topk.device)
    lens = torch.empty(tokens, dtype=torch.int32, device=topk.device)
    if tokens:
        _topk_slots_kernel[(tokens,)](
            topk,
            request,
            block_table,
            positions,
            slots,
            lens,
            topk.stride(0),
            block_table.stride(0),
            ratio,
            page_rows,
            width,
            BLOCK_K=_BLOCK_K,
        )
    return slots, lens


COMPILES = (
    Launch(
        _topk_slots_kernel,
        {
            "topk_ptr": "*i32",
            "request_ptr": "*i32",
            "table_ptr": "*i32",
            "positions_ptr": "*i64",
            "slots_ptr": "*i32:16",
            "lens_ptr": "*i32:16",
            "stride_topk_tok": "i32",
            "stride_table_req": "i32",
            "ratio": "i32",
            "page_rows": "i32:16",
            "width": "i32",
        },
        {"BLOCK_K": _BLOCK_K},
    ),
)


def topk_slots(
    topk: torch.Tensor,
    request: torch.Tensor,
    block_table: torch.Tensor,
    positions: torch.Tensor,
    ratio: int,
    page_rows: int,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map selected compressed rows to physical slots, dropping those that the token cannot see.

    Axes: T tokens, K selected entries, R requests, N pages a request at most.

    Args:
        topk: int32 [T, K], rows of the token's own request, any order; -1 or anything else outside
            [0, (position + 1) // ratio) does not count.
        request: int32 [T], request of each token in [0, R); negative for a padding token, which selects nothing.
        block_table: int32 [R, N], pages of the compressed cache; only those of counted rows are read.
        positions: int64 [T], tokens.
        ratio: tokens a compressed row, at least 1.
        page_rows: rows a page of the compressed cache, at least 1.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        slots int32 [T, K], page * page_rows + row within the page, -1 where an entry does not count; entries keep
        their column. lens int32 [T], one past the last column that counts, 0 if none does. Newly allocated.

    Numerics: integers.
    Graph safety: allocates its results, does not synchronise, depends on no host value but `ratio` and `page_rows`.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a ratio or page_rows below 1.
    Source: model_spec section 5; replaces `compute_global_topk_indices_and_lens`.
    """
    OP.check(topk=topk, request=request, block_table=block_table, positions=positions)
    if min(ratio, page_rows) < 1:
        raise ContractError(f"{OP.name}: ratio is {ratio} and page_rows {page_rows}, both must be at least 1")
    return OP.choose(topk.device, implementation)(topk, request, block_table, positions, ratio, page_rows)


def _inputs(sizes, generator, device):
    tokens, requests, ratio, page_rows = sizes["T"], 3, sizes["ratio"], sizes["page_rows"]
    positions = integers(generator, 0, 1000, tokens)
    pages = 1000 // ratio // page_rows + 1
    return {
        "topk": integers(generator, -1, 1000 // ratio, tokens, sizes["K"], dtype=torch.int32, device=device),
        "request": integers(generator, -1, requests, tokens, dtype=torch.int32, device=device),
        "block_table": integers(generator, 1, 10_000, requests, pages, dtype=torch.int32, device=device),
        "positions": positions.to(device),
        "ratio": ratio,
        "page_rows": page_rows,
    }


OP = Op(
    name="topk_slots",
    summary="Map selected compressed rows to physical slots, dropping those that the token cannot see.",
    axes={"T": "tokens", "K": "selected entries", "R": "requests", "N": "pages a request at most"},
    inputs=(
        Arg("topk", "T K", (torch.int32,)),
        Arg("request", "T", (torch.int32,)),
        Arg("block_table", "R N", (torch.int32,)),
        Arg("positions", "T", (torch.int64,)),
    ),
    outputs=(Arg("slots", "T K", (torch.int32,)), Arg("lens", "T", (torch.int32,))),
    reference=topk_slots_ref,
    implementations=(Implementation("triton", _topk_slots_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"slots": EXACT, "lens": EXACT},
    cases=tuple(
        Case(f"t{t}_k{k}_r{ratio}_p{rows}", {"T": t, "K": k, "ratio": ratio, "page_rows": rows}, _inputs)
        for t, k, ratio, rows in ((0, 64, 1, 128), (1, 64, 2, 64), (33, 512, 1, 128), (7, 64, 2, 32))
    ),
    bytes_moved=lambda s: s["T"] * (s["K"] * 8 + 16),
    flops=lambda s: 0,
    replaces="vllm.models.deepseek_v41.common.ops.cache_utils.compute_global_topk_indices_and_lens",
    source="5",
)
