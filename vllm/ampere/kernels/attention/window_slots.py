# SPDX-License-Identifier: Apache-2.0
"""List the slots of each token's sliding window.

Causal layers see the last `window` tokens up to their own. A DSpark draft block of n tokens is seen whole by each
of its tokens, with the window before it: there `window` is the model's plus n, and `ahead` the distance to the
block's end, so that every token of the block lists the same rows.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import integers
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import EXACT, Case, Implementation, Op
from ..triton_slots import page_slots
from .reference import window_slots_ref

_BLOCK_W = 256


@triton.jit
def _window_slots_kernel(
    positions_ptr,
    request_ptr,
    table_ptr,
    first_ptr,
    ahead_ptr,
    slots_ptr,
    lens_ptr,
    stride_table_req,
    window,
    page_rows,
    AHEAD: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program owns one token; `slots_ptr` is dense."""
    token = tl.program_id(0).to(tl.int64)
    request = tl.load(request_ptr + token)
    row_of = tl.maximum(request, 0).to(tl.int64)
    last = tl.load(positions_ptr + token)
    if AHEAD:
        last += tl.load(ahead_ptr + token)
    begin = tl.maximum(tl.maximum(last - window + 1, 0), tl.load(first_ptr + row_of))
    length = tl.where(request >= 0, tl.maximum(last - begin + 1, 0), 0)
    for left in range(0, window, BLOCK_W):
        column = left + tl.arange(0, BLOCK_W)
        slots = page_slots(table_ptr + row_of * stride_table_req, begin + column, column < length, page_rows)
        tl.store(slots_ptr + token * window + column, slots, mask=column < window)
    tl.store(lens_ptr + token, length.to(tl.int32))


def _window_slots_triton(positions, request, block_table, first, window, page_rows, ahead=None):
    tokens = len(positions)
    slots = torch.empty(tokens, window, dtype=torch.int32, device=positions.device)
    lens = torch.empty(tokens, dtype=torch.int32, device=positions.device)
    if tokens:
        _window_slots_kernel[(tokens,)](
            positions,
            request,
            block_table,
            first,
            request if ahead is None else ahead,
            slots,
            lens,
            block_table.stride(0),
            window,
            page_rows,
            AHEAD=ahead is not None,
            BLOCK_W=_BLOCK_W,
        )
    return slots, lens


COMPILES = tuple(
    Launch(
        _window_slots_kernel,
        {
            "positions_ptr": "*i64:16",
            **{f"{name}_ptr": "*i32:16" for name in ("request", "table", "first", "ahead", "slots", "lens")},
            "stride_table_req": "i32",
            "window": "i32",
            "page_rows": "i32:16",
        },
        {"AHEAD": ahead, "BLOCK_W": _BLOCK_W},
    )
    for ahead in (False, True)
)


def window_slots(
    positions: torch.Tensor,
    request: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    window: int,
    page_rows: int,
    ahead: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the window of each token as slots, oldest first, packed from column 0.

    Axes: T tokens, R requests, N pages a request at most.

    Args:
        positions: int64 [T], tokens.
        request: int32 [T], request of each token in [0, R); negative for a padding token, whose window is empty.
        block_table: int32 [R, N], pages of the window cache; only those of listed rows are read.
        first: int32 [R], tokens: the first position whose row is in the cache (0, or where a bounded replay starts).
        window: tokens a window holds at most, at least 1.
        page_rows: rows a page of the window cache, at least 1.
        ahead: int32 [T], tokens after its own that each token sees, at least 0; None: none. The window ends at
            position + ahead and holds the same number of tokens.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        slots int32 [T, window] of positions max(0, first, last - window + 1) to last = position + ahead, -1 after
        them; lens int32 [T], how many there are, 0 where `first` is after `last`. Newly allocated.

    Numerics: integers.
    Graph safety: allocates its results, does not synchronise, depends on no host value but `window` and `page_rows`.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a window or page_rows below 1.
    Source: model_spec sections 5 and 9; replaces the kernels behind `_COMPUTE_SWA_INDICES_AND_LENS_KERNEL` and
        `_COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL`.
    """
    OP.check(positions=positions, request=request, block_table=block_table, first=first, ahead=ahead)
    if min(window, page_rows) < 1:
        raise ContractError(f"{OP.name}: window is {window} and page_rows {page_rows}, both must be at least 1")
    return OP.choose(positions.device, implementation)(positions, request, block_table, first, window, page_rows, ahead)


def _inputs(sizes, generator, device):
    tokens, requests, page_rows = sizes["T"], 3, sizes["page_rows"]
    given = {
        "positions": integers(generator, 0, 500, tokens, device=device),
        "request": integers(generator, -1, requests, tokens, dtype=torch.int32, device=device),
        "block_table": integers(generator, 1, 10_000, requests, 520 // page_rows + 1, dtype=torch.int32, device=device),
        "first": integers(generator, 0, 200, requests, dtype=torch.int32, device=device),
        "window": sizes["window"],
        "page_rows": page_rows,
    }
    if sizes["ahead"]:
        given["ahead"] = integers(generator, 0, sizes["ahead"], tokens, dtype=torch.int32, device=device)
    return given


OP = Op(
    name="window_slots",
    summary="List the slots of each token's sliding window.",
    axes={"T": "tokens", "R": "requests", "N": "pages a request at most", "window": "tokens a window holds"},
    inputs=(
        Arg("positions", "T", (torch.int64,)),
        Arg("request", "T", (torch.int32,)),
        Arg("block_table", "R N", (torch.int32,)),
        Arg("first", "R", (torch.int32,)),
        Arg("ahead", "T", (torch.int32,), optional=True),
    ),
    outputs=(Arg("slots", "T window", (torch.int32,)), Arg("lens", "T", (torch.int32,))),
    reference=window_slots_ref,
    implementations=(Implementation("triton", _window_slots_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"slots": EXACT, "lens": EXACT},
    cases=tuple(
        Case(f"t{t}_w{window}_a{ahead}", {"T": t, "window": window, "page_rows": rows, "ahead": ahead}, _inputs)
        for t, window, rows, ahead in ((0, 128, 32, 0), (1, 128, 32, 0), (65, 128, 64, 0), (10, 133, 32, 5))
    ),
    bytes_moved=lambda s: s["T"] * (s["window"] * 4 + 20),
    flops=lambda s: 0,
    replaces="vllm.v1.attention.backends.mla.sparse_swa.ComputeSWAIndicesAndLensKernel",
    source="5",
)
