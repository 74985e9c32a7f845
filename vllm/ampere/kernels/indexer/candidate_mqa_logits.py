# SPDX-License-Identifier: Apache-2.0
"""Index scores of the rows of listed blocks only, read from the pages of the index cache.

The sum of `paged_mqa_logits` for the at most 2048 x 8 rows that a candidate list names, packed: column j is row j % 8 of
the list's block j // 8. Work and result stop growing with the context where the list is full. Upstream scores every row
and masks what is not listed.

A Triton program owns one query token and every n-th tile of 64 packed columns, eight blocks of the released model: a
block is 1 KiB of codes in a row. A list names blocks in ascending order, so those that a token sees lie within its first
ceil(visible / block size) entries; the columns behind are filled without a load.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import ascending_lists, integers
from ..contracts import Arg
from ..launch import Launch, aligned_rows, tl, triton, unavailable
from ..registry import Case, Implementation, Op
from . import paged_mqa_logits
from .reference import candidate_mqa_logits_ref
from .score_tile import (
    head_block,
    load_paged_keys,
    load_queries,
    load_weights,
    programs_a_row,
    score_tile,
    words_are_aligned,
)

# As in `paged_mqa_logits` for one token.
_KEYS, _WARPS, _STAGES, _PROGRAMS_PER_MULTIPROCESSOR = 64, 2, 1, 6


@triton.jit(
    do_not_specialize=["stride_table_row", "stride_candidates_row", "listed"],
    do_not_specialize_on_alignment=["table_ptr", "request_ptr", "visible_ptr"],
)
def _candidate_mqa_logits_kernel(
    q_ptr, weights_ptr, cache_ptr, table_ptr, request_ptr, visible_ptr, candidates_ptr, out_ptr,
    stride_weights_row, stride_cache_page, stride_table_row, stride_candidates_row, stride_out_row, listed,
    N: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr, ALIGNED: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(1) * KEYS
    start = tl.program_id(1) * KEYS
    width = listed * SIZE
    visible = tl.maximum(tl.load(visible_ptr + row), 0)
    blocks = tl.cdiv(visible, SIZE)
    end = tl.minimum(blocks, listed) * SIZE
    table_ptr += tl.load(request_ptr + row).to(tl.int64) * stride_table_row
    q = load_queries(q_ptr, row, True, N, HEADS, ALIGNED)
    weights = load_weights(weights_ptr + row * stride_weights_row, True, N, HEADS)
    candidates_ptr += row * stride_candidates_row
    out_ptr += row * stride_out_row
    for base in range(start, end, step):
        column = base + tl.arange(0, KEYS)
        block = tl.load(candidates_ptr + column // SIZE, column < width, other=-1)
        named = (block >= 0) & (block < blocks)
        key = tl.where(named, block, 0) * SIZE + column % SIZE
        seen = named & (key < visible)
        page = tl.load(table_ptr + key // P, seen, other=0)
        keys, scale = load_paged_keys(
            cache_ptr, stride_cache_page, page, key % P, seen, P, KEYS, ALIGNED
        )
        score = score_tile(q, weights, keys, scale)
        tl.store(out_ptr + column, tl.where(seen, score, float("-inf")), column < width)
    unseen = start + tl.cdiv(tl.maximum(end - start, 0), step) * step
    for base in range(unseen, width, step):
        column = base + tl.arange(0, KEYS)
        tl.store(out_ptr + column, tl.full([KEYS], float("-inf"), tl.float32), column < width)


def _candidate_mqa_logits_triton(q, weights, cache, block_table, request, visible, candidates, block_size):
    tokens, heads = weights.shape
    listed = candidates.shape[1]
    out = aligned_rows(weights, tokens, listed * block_size)
    if out.numel():
        tiles = triton.cdiv(listed * block_size, _KEYS)
        programs = programs_a_row(q.device, tokens, tiles, _PROGRAMS_PER_MULTIPROCESSOR)
        aligned = words_are_aligned(q, 0) and words_are_aligned(cache, cache.stride(0))
        _candidate_mqa_logits_kernel[(tokens, programs)](
            q.view(torch.uint8), weights, cache, block_table, request, visible, candidates, out,
            weights.stride(0), cache.stride(0), block_table.stride(0), candidates.stride(0), out.stride(0), listed,
            N=heads, P=cache.shape[1], SIZE=block_size, HEADS=head_block(heads), ALIGNED=aligned,
            KEYS=_KEYS, num_warps=_WARPS, num_stages=_STAGES,
        )
    return out


COMPILES = tuple(
    Launch(
        _candidate_mqa_logits_kernel,
        {
            "q_ptr": "*u8:16", "weights_ptr": "*fp32:16", "cache_ptr": "*u8:16", "table_ptr": "*i32",
            "request_ptr": "*i32", "visible_ptr": "*i32", "candidates_ptr": "*i32:16", "out_ptr": "*fp32:16",
            "stride_weights_row": "i32:16", "stride_cache_page": "i32:16", "stride_table_row": "i32",
            "stride_candidates_row": "i32", "stride_out_row": "i32:16", "listed": "i32",
        },
        {"N": 32, "P": page, "SIZE": 8, "HEADS": head_block(32), "ALIGNED": True, "KEYS": _KEYS},
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    for page in (64, 128)
)


def candidate_mqa_logits(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    request: torch.Tensor,
    visible: torch.Tensor,
    candidates: torch.Tensor,
    block_size: int,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Score each query token against the keys of its listed blocks.

    Axes: T query tokens, N index heads, B pages, P keys a page, R requests, C page-table columns, L listed blocks.

    Args:
        q, weights, cache, block_table, request, visible: as in `paged_mqa_logits`. Keys that are not listed, or that
            no token sees, may hold anything, and their pages are not looked up.
        candidates: int32 [T, L]; block numbers strictly ascending, then -1, as `candidate_blocks` lists them. A block
            that the token does not see counts as -1.
        block_size: keys a block, at least 1.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 [T, L * block_size]: column j is key candidates[j // block_size] * block_size + j % block_size; -inf
        where no block is listed or the token does not see the key. `select_topk` takes it with its candidates.

    Numerics: products and sums in float32; each score has the bits that `paged_mqa_logits` gives it. A NaN key gives
    NaN in its own column only.
    Graph safety: allocates its result; the reference reads request and visible on the host, and allocates the scores
    of eight tokens and the keys of one request at a time.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a block size below 1.
    Source: model_spec sections 5 and 12; replaces `fp8_fp4_paged_mqa_logits` followed by `apply_candidate_mask`.
    """
    OP.check(
        q=q, weights=weights, cache=cache, block_table=block_table, request=request, visible=visible,
        candidates=candidates,
    )
    if block_size < 1:
        raise ContractError(f"{OP.name}: block_size is {block_size}, must be at least 1")
    function = OP.choose(q.device, implementation)
    return function(q, weights, cache, block_table, request, visible, candidates, block_size)


def _inputs(sizes, generator, device):
    """Every token sees half of the keys at least, and lists a block at least."""
    given = paged_mqa_logits.OP.cases[0].make(sizes, generator, device)
    del given["width"], given["fill"]
    given["visible"] = integers(generator, sizes["S"] // 2, sizes["S"] + 1, sizes["T"], dtype=torch.int32, device=device)
    counts = integers(generator, 1, sizes["L"] + 1, sizes["T"])
    listed = ascending_lists(generator, counts, -(-sizes["S"] // sizes["block_size"]), sizes["L"]).to(device)
    return given | {"candidates": listed, "block_size": sizes["block_size"]}


def _bytes_moved(sizes):
    columns = sizes["L"] * sizes["block_size"]
    return sizes["T"] * (sizes["N"] * 132 + columns * (132 + 4) + sizes["L"] * 4)


OP = Op(
    name="candidate_mqa_logits",
    summary="Index scores of the rows of listed blocks only, packed.",
    axes=paged_mqa_logits.OP.axes | {"L": "listed blocks"},
    inputs=(*paged_mqa_logits.OP.inputs, Arg("candidates", "T L", (torch.int32,))),
    outputs=paged_mqa_logits.OP.outputs,
    reference=candidate_mqa_logits_ref,
    implementations=(Implementation("triton", _candidate_mqa_logits_triton, ("sm80", "sm86"), unavailable),),
    tolerances=paged_mqa_logits.OP.tolerances,
    cases=tuple(
        Case(
            f"t{t}_n{n}_r{r}_p{p}_s{s}_l{listed}_b{b}",
            {"T": t, "N": n, "R": r, "P": p, "S": s, "L": listed, "block_size": b}, _inputs,
        )
        for t, n, r, p, s, listed, b in (
            (0, 8, 1, 64, 9, 4, 8), (1, 32, 1, 64, 300, 20, 8), (6, 32, 1, 32, 1000, 40, 8), (33, 8, 5, 128, 700, 16, 5),
        )
    ),
    bytes_moved=_bytes_moved,
    flops=lambda s: s["T"] * s["L"] * s["block_size"] * s["N"] * (2 * 128 + 3),
    replaces="vllm.model_executor.kernels.attention.dsa.candidate_blocks.apply_candidate_mask",
    source="5",
)
