# SPDX-License-Identifier: Apache-2.0
"""`mhc_post_pre` in two launches up to 32 tokens: every stream value is read once and written once.

At a decode step the bytes are the projection's: 24 x 20,480 float32 are 1.97 MB, beside 0.1 MB a token. So the first
kernel spreads its columns over the card: a program expands four tokens in a few dimensions of all four streams, stores
them, and multiplies them, still in registers, with its columns of the projection. It leaves 24 partial products and
two partial sums of squares a token, and the collapsed input without its norm.

The second kernel adds the partials in one order, always the same. One program a token makes the coefficients,
Sinkhorn's iteration in registers; the others scale the collapsed input, 1024 dimensions each.

Longer batches take four other kernels (`mhc_long_triton`).
"""

from ..launch import Launch, tl, triton
from .mhc_long_triton import CHUNK, COLLAPSED, FINISH_TYPES, PARTIALS, SQUARE, expand_and_project, finish, rows_of
from .sinkhorn_triton import balanced, softmax_of_four

# Tokens of the longest batch that one kernel expands and projects, and of a program of it, with its dimensions and warps.
_LONG = 32
_ROWS, _BLOCK = 4, 32
# Partials that the second kernel has in flight: 160 programs write them for 5,120 dimensions.
_AT_ONCE = 256
_WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def _mhc_post_project_kernel(
    y_ptr, streams_ptr, post_ptr, comb_ptr, fn_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
    stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
    stride_fn, stride_pre_tok, tokens,
    D: tl.constexpr, PRE: tl.constexpr, AUX: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PARTIALS: tl.constexpr,
):  # fmt: skip
    """Expand `ROWS` tokens in `BLOCK` dimensions, project and collapse them."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, n = row < tokens, tl.arange(0, PARTIALS)
    token, some = row[:, None], live[:, None]
    comb_ptr += token * stride_comb_tok
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
    for k in tl.static_range(4):  # all of the projection is asked for before any of it is used
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
        products += value[:, None, :] * fn[None, :, :]
    rounded = collapsed.to(tl.bfloat16)
    tl.store(input_ptr + token * D + d[None, :], rounded, here)
    if AUX:
        tl.store(aux_ptr + token * D + d[None, :], (total * 0.25).to(tl.bfloat16), here)
    partial_ptr += (tl.program_id(0).to(tl.int64) * tokens + row) * PARTIALS
    tl.store(partial_ptr[:, None] + n[None, :], tl.sum(products, 2), some & (n < 24)[None, :])
    tl.store(partial_ptr + SQUARE, tl.sum(squares, 1), live)
    tl.store(partial_ptr + COLLAPSED, tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 1), live)


@triton.jit(do_not_specialize=["tokens", "splits", "turns"])
def _mhc_finish_kernel(
    partial_ptr, scale_ptr, base_ptr, weight_ptr, post_ptr, comb_ptr, pre_ptr, input_ptr,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps, tokens, splits, turns,
    D: tl.constexpr, CHUNK: tl.constexpr, PARTIALS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A token's coefficients (program 0), and its collapsed input normalised, a chunk each (the others).

    AT_ONCE of the `splits` partials are asked for before any is added.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, s = tl.arange(0, PARTIALS), tl.arange(0, AT_ONCE)
    partials = tl.zeros([AT_ONCE, PARTIALS], tl.float32)
    for first in range(0, splits, AT_ONCE):
        at = (first + s).to(tl.int64)[:, None] * tokens + token
        held = ((first + s) < splits)[:, None] & (n < 26)[None, :]
        partials += tl.load(partial_ptr + at * PARTIALS + n[None, :], held, other=0.0)
    sums = tl.sum(partials, 0)
    if part == 0:
        square = tl.sum(tl.where(n == SQUARE, sums, 0.0), 0)
        factor = tl.load(scale_ptr + tl.where(n < 4, 0, tl.where(n < 8, 1, 2)))
        mix = sums * tl.rsqrt(square / (4 * D) + rms_eps) * factor + tl.load(base_ptr + n, n < 24, other=0.0)
        mix = tl.where(n < 24, mix, 0.0)
        gate = 1.0 / (1.0 + tl.exp(-mix))
        tl.store(pre_ptr + token * 4 + n, gate + pre_eps, n < 4)
        tl.store(post_ptr + token * 4 + n - 4, gate * post_alpha, (n >= 4) & (n < 8))
        comb = ()
        for row in tl.static_range(4):
            at = 8 + 4 * row
            comb = comb + softmax_of_four(
                _column(mix, n, at), _column(mix, n, at + 1), _column(mix, n, at + 2), _column(mix, n, at + 3), sinkhorn_eps
            )
        comb = balanced(comb, turns, sinkhorn_eps)
        for i in tl.static_range(16):
            tl.store(comb_ptr + token * 16 + i, comb[i])
    else:
        d = (part - 1) * CHUNK + tl.arange(0, CHUNK)
        scale = tl.rsqrt(tl.sum(tl.where(n == COLLAPSED, sums, 0.0), 0) / D + norm_eps)
        x = tl.load(input_ptr + token * D + d, d < D, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + d, d < D, other=0.0).to(tl.float32)
        tl.store(input_ptr + token * D + d, (x * scale * weight).to(tl.bfloat16), d < D)


@triton.jit
def _column(mix, n, column):
    """One of the numbers `mix`, as a scalar."""
    return tl.sum(tl.where(n == column, mix, 0.0), 0)


def tiling(tokens: int) -> int:
    """What the number of tokens picks binaries by: those of a program that multiplies."""
    return rows_of(tokens) if tokens > _LONG else _ROWS


def mhc_post_pre_triton(
    y, streams, post, comb, fn, scale, base, pre_mix, norm_weight,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps, capture_aux=False,
):  # fmt: skip
    """See `mhc_post_pre`."""
    tokens, dim = y.shape
    out, layer_input = y.new_empty(tokens, 4, dim), y.new_empty(tokens, dim)
    aux = y.new_empty(tokens if capture_aux else 0, dim)
    mixes = [scale.new_empty(tokens, *shape) for shape in ((4, 1), (4, 4), (4,))]
    last = (
        scale, base, layer_input if norm_weight is None else norm_weight, *mixes, layer_input,
        rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps, tokens,
    )  # fmt: skip
    chunks = 0 if norm_weight is None else triton.cdiv(dim, CHUNK)
    if tokens > _LONG:
        partial, splits = expand_and_project(y, streams, post, comb, fn, pre_mix, out, layer_input, aux)
        finish(partial, splits, *last, sinkhorn_iters, chunks)
    elif tokens:
        splits = triton.cdiv(dim, _BLOCK)
        partial = scale.new_empty(splits, tokens, PARTIALS)
        pre = post if pre_mix is None else pre_mix
        _mhc_post_project_kernel[(splits, triton.cdiv(tokens, _ROWS))](
            y, streams, post, comb, fn, pre, out, layer_input, aux, partial,
            y.stride(0), streams.stride(0), streams.stride(1), post.stride(0), post.stride(1), comb.stride(0),
            comb.stride(1), fn.stride(0), pre.stride(0), tokens,
            D=dim, PRE=pre_mix is not None, AUX=capture_aux, ROWS=_ROWS, BLOCK=_BLOCK, PARTIALS=PARTIALS,
            num_warps=_WARPS, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
        _mhc_finish_kernel[(tokens, 1 + chunks)](
            partial, *last, splits, sinkhorn_iters,
            D=dim, CHUNK=CHUNK, PARTIALS=PARTIALS, AT_ONCE=_AT_ONCE, num_warps=_WARPS,
        )  # fmt: skip
    post, comb, pre = mixes
    return out, post, comb, layer_input, pre, aux


_PROJECT = {
    "y_ptr": "*bf16:16", "streams_ptr": "*bf16:16", "post_ptr": "*fp32:16", "comb_ptr": "*fp32:16",
    "fn_ptr": "*fp32:16", "pre_mix_ptr": "*fp32:16", "out_ptr": "*bf16:16", "input_ptr": "*bf16:16",
    "aux_ptr": "*bf16:16", "partial_ptr": "*fp32:16", "stride_y_tok": "i32:16", "stride_streams_tok": "i32:16",
    "stride_streams": "i32:16", "tokens": "i32", "stride_post_tok": "i32", "stride_post": "i32", "stride_comb_tok": "i32:16",
    "stride_comb": "i32", "stride_fn": "i32:16", "stride_pre_tok": "i32",
}  # fmt: skip
COMPILES = (
    *(
        Launch(
            _mhc_post_project_kernel, _PROJECT,
            {"D": 5120, "PRE": True, "AUX": aux, "ROWS": _ROWS, "BLOCK": _BLOCK, "PARTIALS": PARTIALS},
            num_warps=_WARPS, num_stages=1, fp_fusion=False,
        )
        for aux in (False, True)
    ),
    Launch(
        _mhc_finish_kernel, FINISH_TYPES, {"D": 5120, "CHUNK": CHUNK, "PARTIALS": PARTIALS, "AT_ONCE": _AT_ONCE}, num_warps=_WARPS
    ),
)  # fmt: skip
