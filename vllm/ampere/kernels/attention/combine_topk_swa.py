# SPDX-License-Identifier: Apache-2.0
"""Lay each token's selected rows and window rows side by side as rows of a gathered workspace.

The workspace of one request has `request_rows` rows: its compressed rows from row 0, its window rows from row
`compressed_rows`. A row of the result has three regions that never overlap: the selected rows, the window rows,
and -1 up to the width.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import integers
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import EXACT, Case, Implementation, Op
from ..triton_slots import request_of
from .reference import combine_topk_swa_ref, combined_width

_BLOCK_C = 256
_BLOCK_R = 64


_RUN_TIME = ("requests", "topk", "width", "request_rows", "compressed_rows", "ratio")
_LISTS = ("query_start_ptr", "seq_lens_ptr", "gather_lens_ptr")


@triton.jit(do_not_specialize=_RUN_TIME, do_not_specialize_on_alignment=_LISTS)
def _combine_topk_swa_kernel(
    topk_rows_ptr,
    query_start_ptr,
    seq_lens_ptr,
    gather_lens_ptr,
    indices_ptr,
    lens_ptr,
    stride_topk_tok,
    stride_indices_tok,
    requests,
    topk,
    width,
    request_rows,
    compressed_rows,
    window,
    ratio,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program owns one token and writes its three regions, column block by column block."""
    token = tl.program_id(0).to(tl.int64)
    origin = tl.load(query_start_ptr)
    request = request_of(token, query_start_ptr, requests, origin, BLOCK_R)
    seq_len = tl.load(seq_lens_ptr + request)
    position = (token - (tl.load(query_start_ptr + 1 + request) - origin) + seq_len).to(tl.int32)
    selected = tl.minimum((position + 1) // ratio, topk)
    gathered_from = seq_len - tl.load(gather_lens_ptr + request)
    begin = tl.maximum(tl.maximum(position - window + 1, 0), gathered_from)
    length = selected + tl.maximum(position - begin + 1, 0)
    base = request.to(tl.int64) * request_rows
    recent_base = base + compressed_rows + (begin - gathered_from) - selected
    for first in range(0, width, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        row = tl.load(topk_rows_ptr + token * stride_topk_tok + column, mask=column < selected, other=-1)
        chosen = tl.where((row >= 0) & (row < compressed_rows), base + row, -1)
        recent = tl.where(column < length, recent_base + column, -1)
        index = tl.where(column < selected, chosen, recent).to(tl.int32)
        tl.store(indices_ptr + token * stride_indices_tok + column, index, mask=column < width)
    tl.store(lens_ptr + token, length)


def _combine_topk_swa_triton(
    topk_rows, query_start, seq_lens, gather_lens, window, ratio, topk, request_rows, compressed_rows, out=None
):
    tokens, device = len(topk_rows), topk_rows.device
    width = combined_width(topk, window)
    if out is None:
        out = (
            torch.empty(tokens, width, dtype=torch.int32, device=device),
            torch.empty(tokens, dtype=torch.int32, device=device),
        )
    indices, lens = out
    if tokens:
        _combine_topk_swa_kernel[(tokens,)](
            topk_rows,
            query_start,
            seq_lens,
            gather_lens,
            indices,
            lens,
            topk_rows.stride(0),
            indices.stride(0),
            len(seq_lens),
            topk if ratio else 0,
            width,
            request_rows,
            compressed_rows,
            window,
            max(ratio, 1),
            BLOCK_C=_BLOCK_C,
            BLOCK_R=_BLOCK_R,
        )
    return indices, lens


COMPILES = (
    Launch(
        _combine_topk_swa_kernel,
        {
            **{f"{name}_ptr": "*i32:16" for name in ("topk_rows", "indices", "lens")},
            **dict.fromkeys(_LISTS, "*i32"),
            **{name: "i32:16" for name in ("stride_topk_tok", "stride_indices_tok", "window")},
            **dict.fromkeys(_RUN_TIME, "i32"),
        },
        {"BLOCK_C": _BLOCK_C, "BLOCK_R": _BLOCK_R},
    ),
)


def combine_topk_swa(
    topk_rows: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor,
    window: int,
    ratio: int,
    topk: int,
    request_rows: int,
    compressed_rows: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine selected and window rows of each token into one list of workspace rows.

    Axes: T tokens of the chunk, C columns given, R requests of the chunk.

    Args:
        topk_rows: int32 [T, C], C >= topk: rows of the token's own request; its first min((position + 1) //
            ratio, topk) columns are used, and one outside [0, compressed_rows) becomes -1.
        query_start: int32 [R+1], first token of each request, ascending; only differences to the first entry count,
            and the last difference is T.
        seq_lens: int32 [R], tokens of each sequence with this chunk.
        gather_lens: int32 [R], how many of its last tokens have a window row in the workspace.
        window: tokens a window holds, at least 1.
        ratio: tokens a compressed row; 0 for a window-only layer.
        topk: columns of `topk_rows` in use; 0 for a window-only layer.
        request_rows: workspace rows a request.
        compressed_rows: workspace rows before a request's window rows.
        out: (indices, lens) as returned, written in place of new tensors.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        indices int32 [T, topk + window rounded up to 128], workspace rows, then -1; lens int32 [T], entries before
        the tail (selected entries that became -1 are counted).

    Numerics: integers, equal to upstream's.
    Graph safety: allocates its results unless `out` is given, does not synchronise, depends on no host value but
        the sizes.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a size out of range.
    Source: model_spec section 5; upstream_gates section 2.3; replaces `combine_topk_swa_indices`.
    """
    axes = OP.check(topk_rows=topk_rows, query_start=query_start, seq_lens=seq_lens, gather_lens=gather_lens)
    if axes["R1"] != axes["R"] + 1:
        raise ContractError(f"{OP.name}: query_start has {axes['R1']} entries, must be {axes['R'] + 1}")
    if not 0 <= topk <= axes["C"]:
        raise ContractError(f"{OP.name}: topk is {topk}, must be in [0, {axes['C']}]")
    if window < 1 or ratio < 0:
        raise ContractError(f"{OP.name}: window is {window} and ratio {ratio}, must be at least 1 and 0")
    return OP.choose(topk_rows.device, implementation)(
        topk_rows, query_start, seq_lens, gather_lens, window, ratio, topk, request_rows, compressed_rows, out
    )


def _inputs(sizes, generator, device):
    lengths, ratio = torch.tensor(sizes["lengths"], dtype=torch.int32), sizes["ratio"]
    before = torch.randint(0, 300, lengths.shape, generator=generator).int()
    replayed = (before.float() * torch.rand(lengths.shape, generator=generator)).int()
    gathered = lengths + torch.minimum(before - replayed, torch.tensor(sizes["window"] - 1))
    compressed_rows = 340 // ratio if ratio else 0
    return {
        "topk_rows": integers(
            generator, -1, compressed_rows + 5, sum(sizes["lengths"]), sizes["C"], dtype=torch.int32, device=device
        ),
        "query_start": (torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) + 17).int().to(device),
        "seq_lens": (before + lengths).to(device),
        "gather_lens": gathered.int().to(device),
        "window": sizes["window"],
        "ratio": ratio,
        "topk": sizes["C"] if ratio else 0,
        "request_rows": compressed_rows + max(gathered.tolist(), default=0),
        "compressed_rows": compressed_rows,
    }


OP = Op(
    name="combine_topk_swa",
    summary="Combine selected and window rows of each token into one list of workspace rows.",
    axes={
        "T": "tokens of the chunk",
        "C": "columns given",
        "R": "requests of the chunk",
        "R1": "requests + 1",
        "width": "topk + window rounded up to 128",
    },
    inputs=(
        Arg("topk_rows", "T C", (torch.int32,)),
        Arg("query_start", "R1", (torch.int32,)),
        Arg("seq_lens", "R", (torch.int32,)),
        Arg("gather_lens", "R", (torch.int32,)),
    ),
    outputs=(Arg("indices", "T width", (torch.int32,)), Arg("lens", "T", (torch.int32,))),
    reference=combine_topk_swa_ref,
    implementations=(Implementation("triton", _combine_topk_swa_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"indices": EXACT, "lens": EXACT},
    cases=tuple(
        Case(name, {"lengths": lengths, "C": c, "ratio": ratio, "window": window}, _inputs)
        for name, lengths, c, ratio, window in (
            ("empty", [], 64, 1, 128),
            ("one", [1], 64, 2, 128),
            ("mixed_r1", [5, 0, 33, 1], 64, 1, 128),
            ("mixed_r2", [5, 1, 40], 512, 2, 64),
            ("window_only", [7, 3], 64, 0, 128),
        )
    ),
    bytes_moved=lambda s: sum(s["lengths"]) * (s["C"] + s["C"] + s["window"] + 1) * 4,
    flops=lambda s: 0,
    replaces="vllm.models.deepseek_v41.common.ops.cache_utils.combine_topk_swa_indices",
    source="5",
)
