# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention over rows that were gathered to bfloat16, for prefill shapes.

In a long step a cached row is selected by hundreds of tokens. `gather_dequant` decodes it once, `combine_topk_swa` lists
for each token which gathered rows it sees, and this reads them: nothing is decoded in the loop, and a tile of rows
serves both matrix products. `sparse_mla_prefill` has the same result without a workspace.
"""

import torch

from ... import arch
from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import Launch, gluon_unavailable, tl, triton, unavailable
from ..registry import Case, Implementation, Op
from . import sparse_mla_rows_gluon
from .reference import sparse_mla_rows_ref
from .sparse_mla_decode import TOLERANCE

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)
_NUM_STAGES = 2


@triton.jit(do_not_specialize=["width"])
def _sparse_mla_rows_kernel(
    q_ptr,
    sink_ptr,
    rows_ptr,
    indices_ptr,
    lens_ptr,
    out_ptr,
    scale,
    stride_q_tok,
    stride_q_head,
    stride_row,
    stride_indices_tok,
    stride_out_tok,
    stride_out_head,
    width,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program owns one token and a block of its heads, and walks the token's list tile by tile."""
    head_blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // head_blocks).to(tl.int64)
    offs_h = tl.program_id(0) % head_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, 512)[None, :]
    offs_n = tl.arange(0, BLOCK_N)
    is_head = (offs_h < HEADS)[:, None]
    q_row = q_ptr + token * stride_q_tok + offs_h.to(tl.int64)[:, None] * stride_q_head
    q = tl.load(q_row + offs_d, mask=is_head, other=0.0)
    length = tl.minimum(tl.load(lens_ptr + token), width)
    indices_ptr += token * stride_indices_tok
    acc = tl.zeros([BLOCK_H, 512], tl.float32)
    peak = tl.full([BLOCK_H], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    log2_scale = scale * _LOG2_E

    for first in range(0, length, BLOCK_N):
        row = tl.load(indices_ptr + first + offs_n, mask=first + offs_n < length, other=-1)
        counts = row >= 0
        k = tl.load(rows_ptr + row.to(tl.int64)[:, None] * stride_row + offs_d, mask=counts[:, None], other=0.0)
        logits = tl.where(counts[None, :], tl.dot(q, tl.trans(k)) * log2_scale, _LOWEST)
        higher = tl.maximum(peak, tl.max(logits, 1))
        # A tile of holes only would otherwise weigh e^0 each.
        weights = tl.where(counts[None, :], tl.exp2(logits - higher[:, None]), 0.0)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
        acc = tl.dot(weights.to(tl.bfloat16), k, acc * shrink[:, None])

    sink = tl.load(sink_ptr + offs_h, mask=offs_h < HEADS, other=0.0) * _LOG2_E
    top = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - top)
    # Compared with zero, not by order: a NaN among the rows has to reach the result.
    factor = shrink / tl.where(total == 0.0, 1.0, total * shrink + tl.exp2(sink - top))
    out_row = out_ptr + token * stride_out_tok + offs_h.to(tl.int64)[:, None] * stride_out_head
    tl.store(out_row + offs_d, (acc * factor[:, None]).to(tl.bfloat16), mask=is_head)


def tiles(heads: int, architecture: str) -> dict[str, int]:
    """Heads and rows of a tile, and warps, for the heads of a rank; SM86 has no room for 64 rows beside 32 heads."""
    block_h = 16 if heads <= 16 else 32
    wide = block_h == 16 or architecture == "sm80"
    return {"BLOCK_H": block_h, "BLOCK_N": 64 if wide else 32, "num_warps": 4}


def _arguments(q, sink, scale, rows, indices, lens, out) -> tuple:
    """Those that both kernels take, in their order."""
    strides = q.stride(0), q.stride(1), rows.stride(0), indices.stride(0), out.stride(0), out.stride(1)
    return q, sink, rows, indices, lens, out, scale, *strides, indices.shape[1]


def _sparse_mla_rows_triton(q, sink, scale, rows, indices, lens, out=None) -> torch.Tensor:
    tokens, heads, _ = q.shape
    if out is None:
        out = torch.empty_like(q)
    if q.numel():
        tile = tiles(heads, arch.of_device(q.device).name)
        _sparse_mla_rows_kernel[(tokens * triton.cdiv(heads, tile["BLOCK_H"]),)](
            *_arguments(q, sink, scale, rows, indices, lens, out), HEADS=heads, **tile, num_stages=_NUM_STAGES
        )
    return out


def _sparse_mla_rows_gluon(q, sink, scale, rows, indices, lens, out=None) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(q)
    if q.numel():
        sparse_mla_rows_gluon.launch_rows(*q.shape[:2], _arguments(q, sink, scale, rows, indices, lens, out))
    return out


_TYPES = {
    **{f"{name}_ptr": "*bf16:16" for name in ("q", "rows", "out")},
    "sink_ptr": "*fp32:16",
    "indices_ptr": "*i32:16",
    "lens_ptr": "*i32:16",
    "scale": "fp32",
    **{f"stride_{name}": "i32:16" for name in ("q_tok", "q_head", "row", "indices_tok", "out_tok", "out_head")},
    "width": "i32",
}


def _launch(heads: int, *architectures: str) -> Launch:
    tile = tiles(heads, architectures[0])
    warps = tile.pop("num_warps")
    return Launch(
        _sparse_mla_rows_kernel, _TYPES, {"HEADS": heads, **tile}, num_warps=warps, num_stages=_NUM_STAGES,
        spill_bytes=160, shared_reason="a tile of 64 rows is 64 KiB, and serves both products",
        architectures=architectures,
    )  # fmt: skip


# 16 and 32 heads differ from these by their masks only.
COMPILES = (
    _launch(8, "sm80", "sm86"),
    _launch(64, "sm80"),
    _launch(64, "sm86"),
    *(sparse_mla_rows_gluon.launch(_TYPES, heads) for heads in (8, 16)),
)


def sparse_mla_rows(
    q: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    rows: torch.Tensor,
    indices: torch.Tensor,
    lens: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attend from each token to the rows that it lists.

    Axes: T tokens, H query heads on this rank, N gathered rows, L entries of a list.

    Args:
        q, sink, scale: queries bfloat16 [T, H, 512], sinks float32 [H] and the factor of the logits, as in
            `sparse_mla_decode`.
        rows: bfloat16 [N, 512], latents; each row dense.
        indices: int32 [T, L], rows in [0, N), or negative: the entry does not count.
        lens: int32 [T], entries at and after this column do not count.
        out: bfloat16 [T, H, 512], written in place of a new tensor.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, H, 512]; a token with no row holds zeros, under any sink. A row listed twice counts twice.
        Rows that no entry names are never read into a result.

    Numerics: float32 logits, softmax and accumulation, weights and result rounded to bfloat16.
    Graph safety: allocates its result unless `out` is given, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 5; upstream_gates section 2.3; replaces `flash_mla_sparse_fwd`.
    """
    OP.check(q=q, sink=sink, rows=rows, indices=indices, lens=lens, out=out)
    return OP.choose(q.device, implementation)(q, sink, scale, rows, indices, lens, out)


def _inputs(sizes, generator, device):
    """About one entry in eight is -1, the lengths vary, and rows that no list names are NaN."""
    tokens, width, count = sizes["T"], sizes["L"], sizes["N"]
    indices = torch.rand(tokens, count, generator=generator).argsort(1)[:, :width].int()
    indices[torch.rand(indices.shape, generator=generator) < 0.125] = -1
    lens = torch.randint(0, width + 1, (tokens,), generator=generator).int()
    counted = indices[torch.arange(width) < lens.unsqueeze(1)]
    rows = normal(generator, count, 512, dtype=torch.float32)
    rows[~torch.isin(torch.arange(count), counted)] = torch.nan
    return {
        "q": normal(generator, tokens, sizes["H"], 512, device=device, scale=2.0),
        "sink": normal(generator, sizes["H"], dtype=torch.float32, device=device),
        "scale": 512**-0.5,
        "rows": rows.bfloat16().to(device),
        "indices": indices.to(device),
        "lens": lens.to(device),
    }


OP = Op(
    name="sparse_mla_rows",
    summary="Attend from each token to the gathered rows that it lists, prefill shapes.",
    axes={"T": "tokens", "H": "query heads on this rank", "N": "gathered rows", "L": "entries of a list"},
    inputs=(
        Arg("q", "T H 512", (torch.bfloat16,)),
        Arg("sink", "H", (torch.float32,)),
        Arg("rows", "N 512", (torch.bfloat16,)),
        Arg("indices", "T L", (torch.int32,)),
        Arg("lens", "T", (torch.int32,)),
        Arg("out", "T H 512", (torch.bfloat16,), optional=True),
    ),
    outputs=(Arg("o", "T H 512", (torch.bfloat16,)),),
    reference=sparse_mla_rows_ref,
    implementations=(
        Implementation("triton", _sparse_mla_rows_triton, ("sm80", "sm86"), unavailable),
        # No card has run it yet.
        Implementation("gluon", _sparse_mla_rows_gluon, ("sm80", "sm86"), gluon_unavailable),
    ),
    tolerances={"o": TOLERANCE},
    cases=tuple(
        Case(f"t{t}_h{h}_n{n}_l{width}", {"T": t, "H": h, "N": n, "L": width}, _inputs)
        for t, h, n, width in ((0, 8, 64, 48), (33, 8, 300, 128), (20, 16, 700, 640), (9, 64, 200, 97), (5, 24, 80, 64))
    ),
    bytes_moved=lambda s: s["T"] * (s["L"] * (1024 + 4) + s["H"] * 512 * 4),
    flops=lambda s: 4 * 512 * s["T"] * s["H"] * s["L"],
    replaces="vllm.v1.attention.ops.flashmla.flash_mla_sparse_fwd",
    source="5",
)
