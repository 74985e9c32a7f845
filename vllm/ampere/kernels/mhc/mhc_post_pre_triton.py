# SPDX-License-Identifier: Apache-2.0
"""`mhc_post_pre` in one or two launches up to 256 tokens: every stream value is read once and written once.

At a decode step the bytes are the projection's: 24 x 20,480 float32 are 1.97 MB, beside 0.1 MB a token. So the first
kernel spreads its columns over the card: a program expands some tokens in a few dimensions of all four streams, stores
them, and multiplies them, still in registers, with its columns of the projection. It leaves 24 partial products and
two partial sums of squares a token, and the collapsed input without its norm.

Up to 32 tokens a program has one to four and multiplies in float32. Above that it has 64 and tensor cores multiply: streams
are bfloat16 and the projection is split into three bfloat16 terms, which together hold all of its 24 bits, so that
products are exact there too and only their sum is rounded.

The second kernel adds the partials in one order, always the same. One program a token makes the coefficients,
Sinkhorn's iteration in registers; the others scale the collapsed input, 1024 dimensions each.

Up to 32 tokens one kernel does both: its programs count themselves once their partials are stored, and the last of those
that share tokens does for these what the second kernel does, with the same bits. None waits for another.

Longer batches take three kernels in place of the first (`mhc_long_triton`).
"""

import functools
from dataclasses import dataclass

import torch

from ..launch import Launch, tl, triton
from .mhc_long_triton import COLLAPSED, PARTIALS, SQUARE, bfloat16_terms, expand_and_project, rows_of

# Tokens of the longest batch that takes one launch (0: none), and of the longest that one kernel expands and projects.
_ONE_LAUNCH_UP_TO, _LONG = 32, 256
_CHUNK = 1024
# Partials in flight: 160 programs write them for 5,120 dimensions, and at most 32 in a long batch.
_AT_ONCE = (256, 32)
_WARPS = 4


@dataclass(frozen=True)
class Tile:
    """What a program of the first kernel holds: `rows` tokens in `block` dimensions; `dot`: on tensor cores,
    `unroll` streams at a time; `finish`: the last program finishes the tokens."""

    rows: int
    block: int
    dot: bool
    unroll: int
    warps: int
    stages: int
    finish: bool = False

    def constants(self, aux: bool, pre: bool = True) -> dict:
        return {"PRE": pre, "AUX": aux, "ROWS": self.rows, "BLOCK": self.block, "DOT": self.dot, "UNROLL": self.unroll,
                "PARTIALS": PARTIALS}  # fmt: skip


FEW, MANY = Tile(4, 32, False, 2, 4, 1), Tile(64, 32, True, 1, 8, 2)
# The last program adds up its tokens one after the other: fewer end sooner, but each group reads the projection again.
ONE_LAUNCH = {rows: Tile(rows, 32, False, 2, 4, 1, finish=True) for rows in (1, 2, 4)}


@triton.jit
def _expand_project(
    y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
    stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
    stride_fn, stride_pre_tok, tokens,
    D: tl.constexpr, PRE: tl.constexpr, AUX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Expand `ROWS` tokens in `BLOCK` dimensions, project and collapse them."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, n = row < tokens, tl.arange(0, PARTIALS)
    token, some = row[:, None], live[:, None]
    comb_ptr += token * stride_comb_tok
    if DOT:
        products = tl.zeros([ROWS, PARTIALS], tl.float32)
    else:
        products = tl.zeros([ROWS, PARTIALS, BLOCK], tl.float32)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = some & (d < D)[None, :]
    x_ptr = streams_ptr + token * stride_streams_tok + d[None, :]
    y = tl.load(y_ptr + token * stride_y_tok + d[None, :], here, other=0.0).to(tl.float32)
    x0 = tl.load(x_ptr, here, other=0.0).to(tl.float32)
    x1 = tl.load(x_ptr + stride_streams, here, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + 2 * stride_streams, here, other=0.0).to(tl.float32)
    x3 = tl.load(x_ptr + 3 * stride_streams, here, other=0.0).to(tl.float32)
    zero = tl.zeros([ROWS, BLOCK], tl.float32)
    collapsed, total, squares = zero, zero, zero
    for k in tl.range(0, 4, loop_unroll_factor=UNROLL):
        mixed = tl.load(comb_ptr + k, some, other=0.0) * x0
        mixed += tl.load(comb_ptr + stride_comb + k, some, other=0.0) * x1
        mixed += tl.load(comb_ptr + 2 * stride_comb + k, some, other=0.0) * x2
        mixed += tl.load(comb_ptr + 3 * stride_comb + k, some, other=0.0) * x3
        mixed += tl.load(post_ptr + token * stride_post_tok + k * stride_post, some, other=0.0) * y
        stream = mixed.to(tl.bfloat16)
        tl.store(out_ptr + (token * 4 + k) * D + d[None, :], stream, here)
        value = stream.to(tl.float32)
        total += value
        squares += value * value
        if PRE:
            collapsed += tl.load(pre_mix_ptr + token * stride_pre_tok + k, some, other=0.0) * value
        else:
            collapsed = tl.where(k == 0, value, collapsed)
        columns = (n < 24)[:, None] & (d < D)[None, :]
        fn = tl.load(fn_ptr + n[:, None] * stride_fn + k * D + d[None, :], columns, other=0.0)
        if DOT:
            high, middle, low = bfloat16_terms(fn)
            products = tl.dot(stream, tl.trans(low), products)
            products = tl.dot(stream, tl.trans(middle), products)
            products = tl.dot(stream, tl.trans(high), products)
        else:
            products += value[:, None, :] * fn[None, :, :]
    rounded = collapsed.to(tl.bfloat16)
    tl.store(input_ptr + token * D + d[None, :], rounded, here)
    if AUX:
        tl.store(aux_ptr + token * D + d[None, :], (total * 0.25).to(tl.bfloat16), here)
    if not DOT:
        products = tl.sum(products, 2)
    partial_ptr += (tl.program_id(0).to(tl.int64) * tokens + row) * PARTIALS
    tl.store(partial_ptr[:, None] + n[None, :], products, some & (n < 24)[None, :])
    tl.store(partial_ptr + SQUARE, tl.sum(squares, 1), live)
    tl.store(partial_ptr + COLLAPSED, tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1), live)


@triton.jit
def _added(partial_ptr, token, tokens, splits, chunks, PARTIALS: tl.constexpr, AT_ONCE: tl.constexpr):
    """float32 [PARTIALS]: a token's partials, `splits` of the products and `chunks` of the squares, added in one order.

    AT_ONCE are asked for before any is added. L1 is not asked: where this launch wrote them, its lines may be older.
    """
    n, s = tl.arange(0, PARTIALS)[None, :], tl.arange(0, AT_ONCE)[:, None]
    partials = tl.zeros([AT_ONCE, PARTIALS], tl.float32)
    held_by = tl.where(n < 24, splits, tl.where(n < 26, chunks, 0))
    for first in range(0, tl.maximum(splits, chunks), AT_ONCE):
        from_ptr = partial_ptr + ((first + s).to(tl.int64) * tokens + token) * PARTIALS + n
        partials += tl.load(from_ptr, first + s < held_by, other=0.0, cache_modifier=".cg")
    return tl.sum(partials, 0)


@triton.jit
def _column(sums, column: tl.constexpr, PARTIALS: tl.constexpr):
    """[...]: one of the last axis, of PARTIALS."""
    return tl.sum(tl.where(tl.arange(0, PARTIALS) == column, sums, 0.0), len(sums.shape) - 1)


@triton.jit
def _load_collapsed(input_ptr, weight_ptr, token, d, D: tl.constexpr):
    """bfloat16: a token's collapsed input without its norm, and the weight, at dimensions d."""
    x = tl.load(input_ptr + token * D + d, (d >= 0) & (d < D), other=0.0, cache_modifier=".cg")
    return x, tl.load(weight_ptr + d, (d >= 0) & (d < D), other=0.0)


@triton.jit
def _store_normalised(input_ptr, x, weight, sums, token, d, norm_eps, D: tl.constexpr, PARTIALS: tl.constexpr):
    """Put the norm in place of what `_load_collapsed` gave, by the token's sums."""
    scale = tl.rsqrt(_column(sums, COLLAPSED, PARTIALS) / D + norm_eps)
    normalised = x.to(tl.float32) * scale * weight.to(tl.float32)
    tl.store(input_ptr + token * D + d, normalised.to(tl.bfloat16), d < D)


@triton.jit
def _factor_and_base(scale_ptr, base_ptr, PARTIALS: tl.constexpr):
    """float32 [PARTIALS] each: what a product is multiplied with, and what is added."""
    n = tl.arange(0, PARTIALS)
    return tl.load(scale_ptr + tl.where(n < 4, 0, tl.where(n < 8, 1, 2))), tl.load(base_ptr + n, n < 24, other=0.0)


@triton.jit
def _store_coefficients(
    sums, factor, base, post_ptr, comb_ptr, pre_ptr, row, tokens,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns, D: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Coefficients of the tokens `row`, [R], whose partials add up to [R, PARTIALS]."""
    n, k = tl.arange(0, PARTIALS)[None, :], tl.arange(0, 4)[None, :]
    token, live = row[:, None], (row < tokens)[:, None]
    square = _column(sums, SQUARE, PARTIALS)[:, None]
    mix = tl.where(n < 24, sums * tl.rsqrt(square / (4 * D) + rms_eps) * factor[None, :] + base[None, :], 0.0)
    gate = 1.0 / (1.0 + tl.exp(-mix))
    tl.store(pre_ptr + token * 4 + n, gate + pre_eps, live & (n < 4))
    tl.store(post_ptr + token * 4 + n - 4, gate * post_alpha, live & (n >= 4) & (n < 8))
    c0 = _source(mix, 0, PARTIALS) + sinkhorn_eps
    c1 = _source(mix, 1, PARTIALS) + sinkhorn_eps
    c2 = _source(mix, 2, PARTIALS) + sinkhorn_eps
    c3 = _source(mix, 3, PARTIALS) + sinkhorn_eps
    for turn in range(turns):
        if turn > 0:
            c0 /= tl.sum(c0, 1, keep_dims=True) + sinkhorn_eps
            c1 /= tl.sum(c1, 1, keep_dims=True) + sinkhorn_eps
            c2 /= tl.sum(c2, 1, keep_dims=True) + sinkhorn_eps
            c3 /= tl.sum(c3, 1, keep_dims=True) + sinkhorn_eps
        whole = c0 + c1 + c2 + c3 + sinkhorn_eps
        c0, c1, c2, c3 = c0 / whole, c1 / whole, c2 / whole, c3 / whole
    to_ptr = comb_ptr + token * 16 + k
    tl.store(to_ptr, c0, live)
    tl.store(to_ptr + 4, c1, live)
    tl.store(to_ptr + 8, c2, live)
    tl.store(to_ptr + 12, c3, live)


@triton.jit
def _source(mix, source: tl.constexpr, PARTIALS: tl.constexpr):
    """Softmax over the destinations of one source stream: float32 [R, 4]."""
    n, k = tl.arange(0, PARTIALS)[None, None, :], tl.arange(0, 4)[None, :, None]
    row = tl.sum(tl.where(n == 8 + 4 * source + k, mix[:, None, :], 0.0), 2)
    row = tl.exp(row - tl.max(row, 1, keep_dims=True))
    return row / tl.sum(row, 1, keep_dims=True)


@triton.jit(do_not_specialize=["tokens"])
def _mhc_post_project_kernel(
    y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
    stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
    stride_fn, stride_pre_tok, tokens,
    D: tl.constexpr, PRE: tl.constexpr, AUX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The first of two launches."""
    _expand_project(
        y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
        stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
        stride_fn, stride_pre_tok, tokens, D, PRE, AUX, ROWS, BLOCK, PARTIALS, DOT, UNROLL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "splits", "chunks", "turns"])
def _mhc_finish_kernel(
    partial_ptr, scale_ptr, base_ptr, weight_ptr, post_ptr, comb_ptr, pre_ptr, input_ptr,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps, tokens, splits, chunks, turns,
    D: tl.constexpr, CHUNK: tl.constexpr, PARTIALS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A token's coefficients (program 0), and its collapsed input normalised, a chunk each (the others)."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = (part - 1) * CHUNK + tl.arange(0, CHUNK)
    # Asked for before the partials have come; program 0 gets zeros.
    x, weight = _load_collapsed(input_ptr, weight_ptr, token, d, D)
    factor, base = _factor_and_base(scale_ptr, base_ptr, PARTIALS)
    sums = _added(partial_ptr, token, tokens, splits, chunks, PARTIALS, AT_ONCE)
    if part == 0:
        _store_coefficients(
            sums[None, :], factor, base, post_ptr, comb_ptr, pre_ptr, token + tl.zeros([1], tl.int64), tokens,
            rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns, D, PARTIALS,
        )  # fmt: skip
    else:
        _store_normalised(input_ptr, x, weight, sums, token, d, norm_eps, D, PARTIALS)


@triton.jit(do_not_specialize=["tokens", "turns"])
def _mhc_post_pre_kernel(
    y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
    stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
    stride_fn, stride_pre_tok, tokens,
    arrived_ptr, scale_ptr, base_ptr, weight_ptr, next_post_ptr, next_comb_ptr, next_pre_ptr,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps, turns,
    D: tl.constexpr, PRE: tl.constexpr, AUX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr, DOT: tl.constexpr, UNROLL: tl.constexpr,
    NORM: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Both launches in one: of the programs of some tokens the last to arrive finishes these."""
    # What is read at the end comes from memory now: the two into registers, the weight's share of this program into L2.
    factor, base = _factor_and_base(scale_ptr, base_ptr, PARTIALS)
    if NORM:
        d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.load(weight_ptr + d, d < D, other=0.0, volatile=True)
    _expand_project(
        y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
        stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
        stride_fn, stride_pre_tok, tokens, D, PRE, AUX, ROWS, BLOCK, PARTIALS, DOT, UNROLL,
    )  # fmt: skip
    group, splits = tl.program_id(1), (D + BLOCK - 1) // BLOCK
    tl.debug_barrier()  # every warp has stored before the program is counted
    if tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel") == splits - 1:
        tl.store(arrived_ptr + group, 0)  # as the next launch has to find it
        first, r, every = group.to(tl.int64) * ROWS, tl.arange(0, ROWS), tl.arange(0, WIDTH)
        sums = tl.zeros([ROWS, PARTIALS], tl.float32)
        for each in range(tl.minimum(tokens - first, ROWS).to(tl.int32)):
            token = first + each
            if NORM:
                x, weight = _load_collapsed(input_ptr, weight_ptr, token, every, D)
            added = _added(partial_ptr, token, tokens, splits, splits, PARTIALS, AT_ONCE)
            sums = tl.where((r == each)[:, None], added[None, :], sums)
            if NORM:
                _store_normalised(input_ptr, x, weight, added, token, every, norm_eps, D, PARTIALS)
        _store_coefficients(
            sums, factor, base, next_post_ptr, next_comb_ptr, next_pre_ptr, first + r, tokens,
            rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns, D, PARTIALS,
        )  # fmt: skip


def tiling(tokens: int) -> Tile | int:
    """What the number of tokens picks binaries by: the first kernel's tile, or the tokens of a long batch's program."""
    if tokens > _LONG:
        return rows_of(tokens)
    if tokens <= _ONE_LAUNCH_UP_TO:
        return ONE_LAUNCH[1 if tokens == 1 else 2 if tokens <= 8 else 4]
    return FEW if tokens <= 32 else MANY


@functools.cache
def _arrived(device: torch.device) -> torch.Tensor:
    """int32 [_LONG]: programs of each group of tokens that have stored their partials; zeros between launches.

    One for a device, so that no two launches may run at a time.
    """
    return torch.zeros(_LONG, dtype=torch.int32, device=device)


def mhc_post_pre_triton(
    y, streams, post, comb, fn, scale, base, pre_mix, norm_weight,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps, capture_aux=False,
):  # fmt: skip
    """See `mhc_post_pre`."""
    tokens, dim = y.shape
    out, layer_input = y.new_empty(tokens, 4, dim), y.new_empty(tokens, dim)
    aux = y.new_empty(tokens if capture_aux else 0, dim)
    mixes = [scale.new_empty(tokens, *shape) for shape in ((4, 1), (4, 4), (4,))]
    if tokens:
        weight = layer_input if norm_weight is None else norm_weight
        numbers = rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps
        if tokens > _LONG:
            partial, splits, square_splits = expand_and_project(
                y, streams, post, comb, fn, pre_mix, out, layer_input, aux
            )
        else:
            tile = tiling(tokens)
            splits = square_splits = triton.cdiv(dim, tile.block)
            partial = scale.new_empty(splits, tokens, PARTIALS)
            pre = post if pre_mix is None else pre_mix
            grid = splits, triton.cdiv(tokens, tile.rows)
            given = (
                y, streams, post, comb, fn, pre, out, layer_input, aux, partial,
                y.stride(0), streams.stride(0), streams.stride(1), post.stride(0), post.stride(1), comb.stride(0),
                comb.stride(1), fn.stride(0), pre.stride(0), tokens,
            )  # fmt: skip
            options = tile.constants(capture_aux, pre_mix is not None) | {
                "D": dim, "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False,
            }  # fmt: skip
            if tile.finish:
                _mhc_post_pre_kernel[grid](
                    *given, _arrived(y.device), scale, base, weight, *mixes, *numbers, sinkhorn_iters,
                    NORM=norm_weight is not None, WIDTH=triton.next_power_of_2(dim), AT_ONCE=_AT_ONCE[0], **options,
                )  # fmt: skip
                return out, *mixes[:2], layer_input, mixes[2], aux
            _mhc_post_project_kernel[grid](*given, **options)
        chunks = 0 if norm_weight is None else triton.cdiv(dim, _CHUNK)
        _mhc_finish_kernel[(tokens, 1 + chunks)](
            partial, scale, base, weight, *mixes, layer_input, *numbers, tokens, splits, square_splits, sinkhorn_iters,
            D=dim, CHUNK=_CHUNK, PARTIALS=PARTIALS, AT_ONCE=_AT_ONCE[tokens > _LONG], num_warps=_WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
    post, comb, pre = mixes
    return out, post, comb, layer_input, pre, aux


_TOKENS = {"tokens": "i32"}
_PROJECT = _TOKENS | {
    "y_ptr": "*bf16:16", "streams_ptr": "*bf16:16", "post_ptr": "*fp32:16", "comb_ptr": "*fp32:16",
    "fn_ptr": "*fp32:16", "pre_mix_ptr": "*fp32:16", "out_ptr": "*bf16:16", "input_ptr": "*bf16:16",
    "aux_ptr": "*bf16:16", "partial_ptr": "*fp32:16", "stride_y_tok": "i32:16", "stride_streams_tok": "i32:16",
    "stride_streams": "i32:16", "stride_post_tok": "i32", "stride_post": "i32", "stride_comb_tok": "i32:16",
    "stride_comb": "i32", "stride_fn": "i32:16", "stride_pre_tok": "i32",
}  # fmt: skip
_FINISH = _TOKENS | {
    "partial_ptr": "*fp32:16", "scale_ptr": "*fp32:16", "base_ptr": "*fp32:16", "weight_ptr": "*bf16:16",
    "post_ptr": "*fp32:16", "comb_ptr": "*fp32:16", "pre_ptr": "*fp32:16", "input_ptr": "*bf16:16",
    "rms_eps": "fp32", "pre_eps": "fp32", "sinkhorn_eps": "fp32", "post_alpha": "fp32", "norm_eps": "fp32",
    "splits": "i32", "chunks": "i32", "turns": "i32",
}  # fmt: skip
_POST_PRE = {name: kind for name, kind in _FINISH.items() if name not in ("splits", "chunks", "pre_ptr")} | _PROJECT | {
    "arrived_ptr": "*i32:16", "next_post_ptr": "*fp32:16", "next_comb_ptr": "*fp32:16", "next_pre_ptr": "*fp32:16",
}  # fmt: skip
COMPILES = (
    *(
        Launch(
            _mhc_post_project_kernel, _PROJECT,
            {"D": 5120} | tile.constants(aux), num_warps=tile.warps, num_stages=tile.stages, fp_fusion=False,
        )
        for tile in (FEW, MANY) for aux in (False, True)
    ),
    *(
        Launch(
            _mhc_finish_kernel, _FINISH, {"D": 5120, "CHUNK": _CHUNK, "PARTIALS": PARTIALS, "AT_ONCE": at_once},
            num_warps=_WARPS, fp_fusion=False,
        )
        for at_once in _AT_ONCE
    ),
    *(
        Launch(
            _mhc_post_pre_kernel, _POST_PRE,
            {"D": 5120, "NORM": True, "WIDTH": 8192, "AT_ONCE": _AT_ONCE[0]} | tile.constants(aux),
            num_warps=tile.warps, num_stages=tile.stages, fp_fusion=False,
        )
        for tile in ONE_LAUNCH.values() for aux in (False, True)
    ),
)  # fmt: skip
