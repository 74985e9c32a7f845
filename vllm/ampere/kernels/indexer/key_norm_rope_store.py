# SPDX-License-Identifier: Apache-2.0
"""Normalise, rotate and quantise index keys, and store them in the paged index cache.

A compressed row stands for `ratio` tokens; its key is written by the group's last token, at the
position of the first. Upstream's kernel writes through an fp8e4nv pointer, which SM80 lacks.

A Triton program owns four tokens; products are not fused with sums, so that it rounds as the reference does.
"""

import torch

from ...cache_layout import INDEX_KEY
from ...errors import ContractError
from ...testing.inputs import integers, normal, rope_table
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..quantization.triton_codec import ue8m0_to_float
from ..registry import Case, Implementation, Op, Tolerance
from .reference import key_norm_rope_store_ref
from .rotate_quantize import rotate_quantize

_ROWS, _WARPS = 4, 1


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _key_norm_rope_store_kernel(
    k_ptr, positions_ptr, cos_sin_ptr, norm_weight_ptr, cache_ptr, slots_ptr,
    stride_k_tok, stride_position, stride_cache_page, eps, rows,
    P: tl.constexpr, RATIO: tl.constexpr, ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, row < rows, other=-1)
    position = tl.load(positions_ptr + row, row < rows, other=0)
    d = tl.arange(0, 128)[None, :]
    # Read beside the slots, not after them: rows that are not kept as well.
    k = tl.load(k_ptr + row[:, None] * stride_k_tok + d, (row < rows)[:, None], other=0.0).to(tl.float32)
    kept = (slot >= 0) & ((position + 1) % RATIO == 0)
    inverse_rms = tl.rsqrt(tl.sum(k * k, 1) / 128 + eps)
    normed = k * inverse_rms[:, None] * tl.load(norm_weight_ptr + d).to(tl.float32)
    normed = normed.to(tl.bfloat16).to(tl.float32)
    first = position // RATIO * RATIO
    codes, byte = rotate_quantize(normed, first, kept, cos_sin_ptr, stride_position, ROWS)
    page_ptr = cache_ptr + slot // P * stride_cache_page
    tl.store((page_ptr + slot % P * 128)[:, None] + d, codes, kept[:, None])
    # Byte by byte, since a page may start at any byte.
    lane = tl.arange(0, 4)[None, :]
    scale = ue8m0_to_float(byte).to(tl.int32, bitcast=True)[:, None] >> (8 * lane)
    tl.store((page_ptr + P * 128 + slot % P * 4)[:, None] + lane, scale.to(tl.uint8), kept[:, None])


def _key_norm_rope_store_triton(k, positions, cos_sin, norm_weight, eps, cache, slots, ratio):
    rows = slots.shape[0]
    if rows:
        _key_norm_rope_store_kernel[(triton.cdiv(rows, _ROWS),)](
            k, positions, cos_sin, norm_weight, cache, slots,
            k.stride(0), cos_sin.stride(0), cache.stride(0), eps, rows,
            P=cache.shape[1], RATIO=ratio, ROWS=_ROWS, num_warps=_WARPS, enable_fp_fusion=False,
        )


COMPILES = tuple(
    Launch(
        _key_norm_rope_store_kernel,
        {
            "k_ptr": "*bf16:16", "positions_ptr": "*i64", "cos_sin_ptr": "*fp32:16", "norm_weight_ptr": "*bf16:16",
            "cache_ptr": "*u8:16", "slots_ptr": "*i64", "stride_k_tok": "i32:16", "stride_position": "i32:16",
            "stride_cache_page": "i32:16", "eps": "fp32", "rows": "i32",
        },
        {"P": 64, "RATIO": ratio, "ROWS": _ROWS},
        num_warps=_WARPS,
        fp_fusion=False,
    )
    for ratio in (1, 2)
)


def key_norm_rope_store(
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    cache: torch.Tensor,
    slots: torch.Tensor,
    ratio: int,
    *,
    implementation: str | None = None,
) -> None:
    """Write one E4M3 key of 128 codes and its float32 scale for each token that closes a group.

    Axes: T tokens, S tokens with a slot (S <= T), B pages, P keys a page, M positions in the table.

    Args:
        k: bfloat16 [T, 128]: `wk` times the pooled latent before its rotation; rows that are not
            written may hold anything.
        positions: int64 [T] (or longer), tokens, each in [0, M) where written.
        cos_sin: float32 [M, 64]: 32 cosines then 32 sines.
        norm_weight: bfloat16 [128].
        eps: added to the mean square; 1e-20 in the released model.
        cache: uint8 [B, P, 132], written in place: a page is P * 128 bytes of codes, then P * 4 of
            scales. Pages may lie apart: their distance in bytes is `cache.stride(0)`, any size.
        slots: int64 [S], slots page * P + row; negative: not written. No slot twice.
        ratio: tokens a compressed row stands for, 1 or 2; a token writes if (position + 1) % ratio == 0.
        implementation: one asked for by name; default is the best for the device.

    Returns: nothing; the cache is written.

    Numerics: norm in float32, rounded to bfloat16; float32 rotation at position // ratio * ratio, rounded
    to bfloat16; scale 2^ceil(log2(max(amax, 1e-4) / 448)); codes rounded to nearest even.
    Graph safety: does not synchronise, depends on no host value. Bytes of other slots keep their bits.
    Raises: ContractError on a wrong dtype, shape, stride or device, more slots than tokens, or a wrong ratio.
    Source: model_spec sections 5 and 12; replaces `indexer_k_norm_rope_store`.
    """
    axes = OP.check(k=k, positions=positions, cos_sin=cos_sin, norm_weight=norm_weight, cache=cache, slots=slots)
    if axes["S"] > min(axes["T"], axes["L"]):
        raise ContractError(f"key_norm_rope_store: {axes['S']} slots for {axes['T']} keys and {axes['L']} positions")
    if ratio not in (1, 2):
        raise ContractError(f"key_norm_rope_store: ratio is {ratio}, must be 1 or 2")
    OP.choose(k.device, implementation)(k, positions, cos_sin, norm_weight, eps, cache, slots, ratio)


def _inputs(sizes, generator, device):
    tokens, page = sizes["T"], sizes["P"]
    pages = 2 + tokens // page
    order = torch.randperm(pages * page, generator=generator)[:tokens]
    return {
        "k": normal(generator, tokens, 128, device=device),
        "positions": integers(generator, 0, sizes["M"], tokens, device=device),
        "cos_sin": rope_table(sizes["M"], device=device),
        "norm_weight": normal(generator, 128, device=device),
        "eps": 1e-20,
        "cache": torch.zeros(pages, page, INDEX_KEY.row_bytes, dtype=torch.uint8, device=device),
        "slots": torch.where(order % 7 == 0, -1, order).to(device),
        "ratio": sizes["ratio"],
    }


OP = Op(
    name="key_norm_rope_store",
    summary="Normalise, rotate and quantise index keys into the paged index cache.",
    axes={
        "T": "tokens", "S": "tokens with a slot", "L": "positions given", "B": "pages", "P": "keys a page",
        "M": "positions in the rotary table",
    },
    inputs=(
        Arg("k", "T 128", (torch.bfloat16,)),
        Arg("positions", "L", (torch.int64,)),
        Arg("cos_sin", "M 64", (torch.float32,)),
        Arg("norm_weight", "128", (torch.bfloat16,)),
        Arg("cache", "B P 132", (torch.uint8,), contiguous="pages"),
        Arg("slots", "S", (torch.int64,)),
    ),
    outputs=(),
    reference=key_norm_rope_store_ref,
    implementations=(Implementation("triton", _key_norm_rope_store_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"cache": Tolerance(2e-3, 0.3)},
    cases=tuple(
        Case(f"t{t}_p{p}_r{r}", {"T": t, "P": p, "M": 4096, "ratio": r}, _inputs)
        for t, p, r in ((0, 64, 1), (1, 64, 1), (6, 32, 2), (129, 128, 2))
    ),
    bytes_moved=lambda s: s["T"] * (16 + (256 + 132 + 256) // s["ratio"]),
    flops=lambda s: s["T"] // s["ratio"] * (128 * 8 + 32 * 6),
    mutates=("cache",),
    replaces="vllm.models.deepseek_v41.common.ops.indexer_k_norm_rope_store",
    source="5",
)
