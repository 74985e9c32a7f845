# SPDX-License-Identifier: Apache-2.0
"""Index scores against keys read from the pages of the index cache.

The same sum as `mqa_logits`, with the keys of a request found through its page table, and the keys of
a request read once for all of its query tokens (a draft block has several). Upstream calls DeepGEMM,
which has no SM80 code.

A Triton program owns one query token, or six (a draft block) that share a decoded tile, and every n-th tile of their
keys: the queries are decoded once, and neither the grid nor, without `fill`, the work grows with `width`, which in a
captured graph is that of the longest context.
"""

import torch

from ...cache_layout import INDEX_KEY
from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, aligned_rows, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import paged_mqa_logits_ref
from .score_tile import (
    SHARED_REASON,
    fill_unseen,
    head_block,
    load_paged_keys,
    load_queries,
    load_weights,
    programs_a_row,
    score_tile,
    walk_of,
    words_are_aligned,
)

# Tokens of a program, keys of a tile, warps, stages, and programs for each multiprocessor (raced on a card).
_ONE, _SIX = (1, 64, 2, 1, 8), (6, 128, 4, 2, 2)
# Rows a request from which six share a program: below, most of its products would be of other requests' keys.
_SHARED_FROM = 3


@triton.jit
def _load_page(pages_ptr, base, columns, other, P: tl.constexpr, KEYS: tl.constexpr):
    """The page of each key of a tile, or the one of all, from a row of the page table; `other` from `columns` on."""
    if P % KEYS == 0:
        page = tl.load(pages_ptr + base // P, base < columns, other=other)
    else:
        key = base + tl.arange(0, KEYS)
        page = tl.load(pages_ptr + key // P, key < columns, other=other)
    return page


@triton.jit(
    do_not_specialize=["stride_table_row", "tokens", "width"],
    do_not_specialize_on_alignment=["table_ptr", "request_ptr", "visible_ptr"],
)
def _paged_mqa_logits_kernel(
    q_ptr, weights_ptr, cache_ptr, table_ptr, request_ptr, visible_ptr, out_ptr,
    stride_weights_row, stride_cache_page, stride_table_row, stride_out_row, tokens, width,
    N: tl.constexpr, P: tl.constexpr, FILL: tl.constexpr, HEADS: tl.constexpr, ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr, KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TOKENS
    requests, counts, q, weights = (), (), (), ()
    for i in tl.static_range(TOKENS):
        there = row + i < tokens
        requests = requests + (tl.load(request_ptr + row + i, there, other=0),)
        visible = tl.load(visible_ptr + row + i, there, other=0)
        counts = counts + (tl.minimum(tl.maximum(visible, 0), width),)
    offset, step = tl.program_id(1) * KEYS, tl.num_programs(1) * KEYS
    # A page is asked for a tile ahead, the first before the queries are decoded: its keys wait for it.
    request, seen, columns = walk_of(0, requests, counts, TOKENS)
    first_page = _load_page(table_ptr + request.to(tl.int64) * stride_table_row, offset, columns, 0, P, KEYS)
    for i in tl.static_range(TOKENS):
        there = row + i < tokens
        q = q + (load_queries(q_ptr, row + i, there, N, HEADS, ALIGNED),)
        weights = weights + (load_weights(weights_ptr + (row + i) * stride_weights_row, there, N, HEADS),)
    out_ptr += row * stride_out_row
    for lead in range(TOKENS):
        request, seen, columns = walk_of(lead, requests, counts, TOKENS)
        pages_ptr = table_ptr + request.to(tl.int64) * stride_table_row
        page = _load_page(pages_ptr, offset, tl.where(lead > 0, columns, 0), first_page, P, KEYS)
        for base in range(offset, columns, step):
            key = base + tl.arange(0, KEYS)
            keys, scale = load_paged_keys(
                cache_ptr, stride_cache_page, page, key % P, key < columns, P, KEYS, ALIGNED
            )
            page = _load_page(pages_ptr, base + step, columns, 0, P, KEYS)
            for i in tl.static_range(TOKENS):
                score = score_tile(q[i], weights[i], keys, scale)
                tl.store(out_ptr + i * stride_out_row + key, score, key < seen[i])
    if FILL:
        for i in tl.static_range(TOKENS):
            count = tl.where(row + i < tokens, counts[i], width)
            fill_unseen(out_ptr + i * stride_out_row, count, offset, step, width, KEYS)


def _paged_mqa_logits_triton(q, weights, cache, block_table, request, visible, width, fill=True):
    tokens, heads = weights.shape
    out = aligned_rows(weights, tokens, width)
    if out.numel():
        block, keys, warps, stages, held = _SIX if tokens >= _SHARED_FROM * len(block_table) else _ONE
        blocks = triton.cdiv(tokens, block)
        programs = programs_a_row(q.device, blocks, triton.cdiv(width, keys), held)
        aligned = words_are_aligned(q, 0) and words_are_aligned(cache, cache.stride(0))
        _paged_mqa_logits_kernel[(blocks, programs)](
            q.view(torch.uint8), weights, cache, block_table, request, visible, out,
            weights.stride(0), cache.stride(0), block_table.stride(0), out.stride(0), tokens, width,
            N=heads, P=cache.shape[1], FILL=fill, HEADS=head_block(heads), ALIGNED=aligned, TOKENS=block, KEYS=keys,
            num_warps=warps, num_stages=stages,
        )
    return out


COMPILES = tuple(
    Launch(
        _paged_mqa_logits_kernel,
        {
            "q_ptr": "*u8:16", "weights_ptr": "*fp32:16", "cache_ptr": "*u8:16", "table_ptr": "*i32",
            "request_ptr": "*i32", "visible_ptr": "*i32", "out_ptr": "*fp32:16", "stride_weights_row": "i32:16",
            "stride_cache_page": "i32:16", "stride_table_row": "i32", "stride_out_row": "i32:16", "tokens": "i32",
            "width": "i32",
        },
        {
            "N": heads, "P": page, "FILL": fill, "HEADS": head_block(heads), "ALIGNED": True, "TOKENS": block,
            "KEYS": keys,
        },
        num_warps=warps,
        num_stages=stages,
        shared_reason=SHARED_REASON if block > 1 else "",
    )
    for heads, page, fill in ((32, 64, False), (32, 64, True), (32, 128, False), (8, 64, False))
    for block, keys, warps, stages, _ in (_ONE, _SIX)
)


def paged_mqa_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    request: torch.Tensor,
    visible: torch.Tensor,
    width: int,
    fill: bool = True,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Score each query token against the first `visible` keys of its request.

    Axes: T query tokens, N index heads, B pages, P keys a page, R requests, C page-table columns.

    Args:
        q: float8_e4m3fn [T, N, 128]; codes of `query_rope_quant`.
        weights: float32 [T, N]; every scale of the query folded in.
        cache: uint8 [B, P, 132]: a page is P * 128 bytes of codes, then P * 4 of float32 scales; pages may
            lie apart (`cache.stride(0)` bytes, any size). Keys no token sees may hold anything.
        block_table: int32 [R, C], pages; key j of request r is row j % P of page block_table[r, j // P].
        request: int32 [T]; row of the table, in [0, R) where visible > 0.
        visible: int32 [T], keys the token sees; 0 or less: none, and its table row is not read.
        width: columns of the result, keys; at least the largest `visible`.
        fill: whether columns from `visible` on are set; if not, they may hold anything.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 [T, width]; columns from `visible` on are -inf, with `fill`.

    Numerics: products and sums in float32. A token has the same bits alone, in any batch and for any
    page size. A NaN key gives NaN in its own column only.
    Graph safety: allocates its result; the reference reads request and visible on the host. Beyond its
    result and one gathered request, the reference allocates a bounded workspace.
    Raises: ContractError on a wrong dtype, shape, stride or device; the reference also if width is too small.
    Source: model_spec sections 5 and 12; replaces `fp8_fp4_paged_mqa_logits`.
    """
    OP.check(q=q, weights=weights, cache=cache, block_table=block_table, request=request, visible=visible)
    return OP.choose(q.device, implementation)(q, weights, cache, block_table, request, visible, width, fill)


def _inputs(sizes, generator, device):
    tokens, requests, page = sizes["T"], sizes["R"], sizes["P"]
    columns = -(-sizes["S"] // page)
    pages = requests * columns + 1
    codes = normal(generator, pages, page * 128, dtype=torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.exp2(integers(generator, -8, 3, pages, page).float()).view(torch.uint8)
    table = torch.randperm(pages, generator=generator)[: requests * columns].view(requests, columns)
    return {
        "q": normal(generator, tokens, sizes["N"], 128, dtype=torch.float8_e4m3fn, device=device),
        "weights": normal(generator, tokens, sizes["N"], dtype=torch.float32, device=device),
        "cache": torch.cat([codes, scales], 1).view(pages, page, INDEX_KEY.row_bytes).to(device),
        "block_table": table.int().to(device),
        "request": integers(generator, 0, requests, tokens, dtype=torch.int32, device=device),
        "visible": integers(generator, 0, sizes["S"] + 1, tokens, dtype=torch.int32, device=device),
        "width": sizes["S"] + 5,
        "fill": bool(sizes.get("fill", True)),
    }


OP = Op(
    name="paged_mqa_logits",
    summary="Index scores against keys read from the pages of the index cache.",
    axes={
        "T": "query tokens", "N": "index heads", "B": "pages", "P": "keys a page", "R": "requests",
        "C": "page-table columns",
    },
    inputs=(
        Arg("q", "T N 128", (torch.float8_e4m3fn,), contiguous="full"),
        Arg("weights", "T N", (torch.float32,)),
        Arg("cache", "B P 132", (torch.uint8,), contiguous="pages"),
        Arg("block_table", "R C", (torch.int32,)),
        Arg("request", "T", (torch.int32,)),
        Arg("visible", "T", (torch.int32,)),
    ),
    outputs=(Arg("logits", "T W", (torch.float32,)),),
    reference=paged_mqa_logits_ref,
    implementations=(Implementation("triton", _paged_mqa_logits_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"logits": Tolerance(1e-5, 1e-4)},
    cases=tuple(
        Case(f"t{t}_n{n}_r{r}_p{p}_s{s}", {"T": t, "N": n, "R": r, "P": p, "S": s}, _inputs)
        for t, n, r, p, s in ((0, 8, 1, 64, 9), (1, 32, 1, 64, 300), (6, 32, 1, 32, 1000), (33, 8, 5, 128, 700))
    ),
    bytes_moved=lambda s: s["T"] * (s["N"] * 132 + s["S"] * 4) + s["R"] * s["S"] * 132,
    flops=lambda s: s["T"] * s["S"] * s["N"] * (2 * 128 + 3),
    replaces="vllm.utils.deep_gemm.fp8_fp4_paged_mqa_logits",
    source="5",
)
