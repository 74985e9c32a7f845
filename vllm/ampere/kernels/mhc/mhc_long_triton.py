# SPDX-License-Identifier: Apache-2.0
"""The launches of `mhc_post_pre` for long batches: expand and collapse as one stream of bytes, project, finish.

A step of 8,192 tokens moves 840 MB of streams. A program that expands, collapses and multiplies at once holds so much
that few fit a multiprocessor, and what few programs ask for does not fill the memory's bandwidth. So one kernel
moves bytes, 1024 dimensions of one token in all streams, and another is a matrix product with 24 columns that reads
the new streams once more: two fifths more bytes. The projection is split into three bfloat16 terms before it, by a
third: streams are bfloat16 already, so that products are exact. The last makes the coefficients of 128 tokens in a
program, a token a thread, and the norm 1024 dimensions of one in each of its others.
"""

import torch

from ..launch import Launch, tl, triton
from .mhc_post import load_sources, mixed_stream
from .sinkhorn_triton import balanced, softmax_of_four

# Columns of a token's partials: 24 products, the streams' squares, the collapsed input's squares, 6 unused.
PARTIALS = 32
SQUARE, COLLAPSED = tl.constexpr(24), tl.constexpr(25)
# Dimensions that a program expands, or normalises.
CHUNK = 1024
_EXPAND_WARPS = 4
# Tokens whose coefficients one program makes: as many as it has threads.
_TOKENS = 32 * _EXPAND_WARPS
_TERMS_BLOCK = 128
_BLOCK, _STAGES = 64, 3
# Programs of the projection that its splits add up to, at least, and splits at most.
_PROGRAMS, _MAX_SPLITS = 256, 32


@triton.jit(do_not_specialize=["tokens"])
def _mhc_expand_kernel(
    y_ptr, streams_ptr, post_ptr, comb_ptr, pre_mix_ptr, out_ptr, input_ptr, aux_ptr, partial_ptr,
    stride_y_tok, stride_streams_tok, stride_streams, stride_post_tok, stride_post, stride_comb_tok, stride_comb,
    stride_pre_tok, tokens,
    D: tl.constexpr, PRE: tl.constexpr, AUX: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """New streams, collapsed input without its norm, their mean; and a part of the squares of the first two."""
    token, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = chunk * BLOCK + tl.arange(0, BLOCK)
    here = d < D
    y, x0, x1, x2, x3 = load_sources(
        y_ptr, streams_ptr, token, d, stride_y_tok, stride_streams_tok, stride_streams, D
    )
    comb_ptr += token * stride_comb_tok
    post_ptr += token * stride_post_tok
    zero = tl.zeros([BLOCK], tl.float32)
    collapsed, total, squares = zero, zero, zero
    for k in tl.static_range(4):
        stream = mixed_stream(comb_ptr, stride_comb, post_ptr, stride_post, k, y, x0, x1, x2, x3)
        tl.store(out_ptr + (token * 4 + k) * D + d, stream, here)
        value = stream.to(tl.float32)
        total += value
        squares += value * value
        if PRE:
            collapsed += tl.load(pre_mix_ptr + token * stride_pre_tok + k) * value
        elif k == 0:
            collapsed = value
    rounded = collapsed.to(tl.bfloat16)
    tl.store(input_ptr + token * D + d, rounded, here)
    if AUX:
        tl.store(aux_ptr + token * D + d, (total * 0.25).to(tl.bfloat16), here)
    partial_ptr += (chunk.to(tl.int64) * tokens + token) * PARTIALS
    tl.store(partial_ptr + SQUARE, tl.sum(squares, 0))
    tl.store(partial_ptr + COLLAPSED, tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 0))


@triton.jit
def _mhc_terms_kernel(fn_ptr, terms_ptr, stride_fn, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr):
    """The projection as bfloat16 [3, PARTIALS, WIDTH], which hold all 24 bits of a float32; rows from 24 on are zero."""
    n, d = tl.arange(0, PARTIALS)[:, None], tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    fn = tl.load(fn_ptr + n * stride_fn + d, (n < 24) & (d < WIDTH), other=0.0)
    high = fn.to(tl.bfloat16)
    rest = fn - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    terms_ptr += n * WIDTH + d
    tl.store(terms_ptr, high, d < WIDTH)
    tl.store(terms_ptr + PARTIALS * WIDTH, middle, d < WIDTH)
    tl.store(terms_ptr + 2 * PARTIALS * WIDTH, low, d < WIDTH)


@triton.jit(do_not_specialize=["tokens", "share"])
def _mhc_project_kernel(
    streams_ptr, terms_ptr, partial_ptr, tokens, share,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """24 products of `ROWS` tokens over `share` blocks of the WIDTH values of a token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live, n = row < tokens, tl.arange(0, PARTIALS)
    first = tl.program_id(1) * share
    products = tl.zeros([ROWS, PARTIALS], tl.float32)
    for block in range(first, tl.minimum(first + share, (WIDTH + BLOCK - 1) // BLOCK)):
        d = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(streams_ptr + row[:, None] * WIDTH + d[None, :], live[:, None] & (d < WIDTH)[None, :], other=0.0)
        term_ptr = terms_ptr + n[None, :] * WIDTH + d[:, None]
        high = tl.load(term_ptr, (d < WIDTH)[:, None], other=0.0)
        middle = tl.load(term_ptr + PARTIALS * WIDTH, (d < WIDTH)[:, None], other=0.0)
        low = tl.load(term_ptr + 2 * PARTIALS * WIDTH, (d < WIDTH)[:, None], other=0.0)
        # A matrix unit cuts off what it adds to long sums: those of blocks are added by rounding.
        block_products = tl.dot(x, low)
        block_products = tl.dot(x, middle, block_products)
        products += tl.dot(x, high, block_products)
    partial_ptr += (tl.program_id(1).to(tl.int64) * tokens + row) * PARTIALS
    tl.store(partial_ptr[:, None] + n[None, :], products, live[:, None] & (n < 24)[None, :])


@triton.jit
def _coefficients(
    token, partial_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, pre_ptr, rms_eps, pre_eps, sinkhorn_eps, post_alpha,
    tokens, splits, turns, D: tl.constexpr, CHUNKS: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Store those of a vector of tokens."""
    live, stride = token < tokens, tokens.to(tl.int64) * PARTIALS
    partial_ptr += token * PARTIALS
    square = tl.zeros_like(token).to(tl.float32)
    sums = ()
    for n in tl.static_range(24):
        sums = sums + (square,)
    for chunk in tl.static_range(CHUNKS):
        square += tl.load(partial_ptr + chunk * stride + SQUARE, live, other=0.0)
    for split in range(splits):
        longer = ()
        for n in tl.static_range(24):
            longer = longer + (sums[n] + tl.load(partial_ptr + split * stride + n, live, other=0.0),)
        sums = longer
    factor = tl.rsqrt(square / (4 * D) + rms_eps)
    mix = ()
    for n in tl.static_range(24):
        mix = mix + (sums[n] * factor * tl.load(scale_ptr + min(n // 4, 2)) + tl.load(base_ptr + n),)
    for n in tl.static_range(4):
        tl.store(pre_ptr + token * 4 + n, 1.0 / (1.0 + tl.exp(-mix[n])) + pre_eps, live)
        tl.store(post_ptr + token * 4 + n, 1.0 / (1.0 + tl.exp(-mix[4 + n])) * post_alpha, live)
    comb = ()
    for n in tl.static_range(8, 24, 4):
        comb = comb + softmax_of_four(mix[n], mix[n + 1], mix[n + 2], mix[n + 3], sinkhorn_eps)
    comb = balanced(comb, turns, sinkhorn_eps)
    for n in tl.static_range(16):
        tl.store(comb_ptr + token * 16 + n, comb[n], live)


@triton.jit(do_not_specialize=["tokens", "splits", "turns"])
def _mhc_finish_long_kernel(
    partial_ptr, scale_ptr, base_ptr, weight_ptr, post_ptr, comb_ptr, pre_ptr, input_ptr,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps, tokens, splits, turns,
    D: tl.constexpr, CHUNK: tl.constexpr, PARTIALS: tl.constexpr, TOKENS: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Coefficients of TOKENS tokens (the first programs), and a chunk of a token's collapsed input normalised (the others).

    Partials are `splits` of the products, and of the squares one a chunk, at most SQUARES.
    """
    chunks: tl.constexpr = (D + CHUNK - 1) // CHUNK
    norm = tl.program_id(0) - (tokens + TOKENS - 1) // TOKENS
    if norm < 0:
        some = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        _coefficients(
            some, partial_ptr, scale_ptr, base_ptr, post_ptr, comb_ptr, pre_ptr, rms_eps, pre_eps, sinkhorn_eps, post_alpha,
            tokens, splits, turns, D, chunks, PARTIALS,
        )  # fmt: skip
    else:
        token, s = (norm // chunks).to(tl.int64), tl.arange(0, SQUARES)
        d = norm % chunks * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(input_ptr + token * D + d, d < D, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + d, d < D, other=0.0).to(tl.float32)
        square_ptr = partial_ptr + (token + s * tokens.to(tl.int64)) * PARTIALS + COLLAPSED
        square = tl.sum(tl.load(square_ptr, s < chunks, other=0.0), 0)
        tl.store(input_ptr + token * D + d, (x * tl.rsqrt(square / D + norm_eps) * weight).to(tl.bfloat16), d < D)


def rows_of(tokens: int) -> int:
    """Tokens of a program of the projection."""
    return 64 if tokens <= 2048 else 128


def splits_of(tokens: int, dim: int) -> tuple[int, int, int]:
    """(tokens of a program of the projection, blocks of each split, splits): enough programs for a card."""
    rows = rows_of(tokens)
    blocks = triton.cdiv(4 * dim, _BLOCK)
    wanted = min(_MAX_SPLITS, triton.cdiv(_PROGRAMS, triton.cdiv(tokens, rows)), blocks)
    share = triton.cdiv(blocks, wanted)
    return rows, share, triton.cdiv(blocks, share)


def expand_and_project(y, streams, post, comb, fn, pre_mix, out, layer_input, aux):
    """Fill `out`, `layer_input` without its norm, and `aux` if it has rows.

    Returns:
        float32 [splits or more, T, PARTIALS], in columns 0 to 23 the products of each split, in 24 and 25 the squares of
        each chunk of dimensions; splits.
    """
    tokens, dim = y.shape
    rows, share, splits = splits_of(tokens, dim)
    chunks = triton.cdiv(dim, CHUNK)
    partial = torch.empty(max(splits, chunks), tokens, PARTIALS, dtype=torch.float32, device=y.device)
    pre = post if pre_mix is None else pre_mix
    _mhc_expand_kernel[(tokens, chunks)](
        y, streams, post, comb, pre, out, layer_input, aux, partial,
        y.stride(0), streams.stride(0), streams.stride(1), post.stride(0), post.stride(1), comb.stride(0),
        comb.stride(1), pre.stride(0), tokens,
        D=dim, PRE=pre_mix is not None, AUX=len(aux) > 0, BLOCK=CHUNK, PARTIALS=PARTIALS, num_warps=_EXPAND_WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip
    terms = torch.empty(3, PARTIALS, 4 * dim, dtype=torch.bfloat16, device=y.device)
    _mhc_terms_kernel[(triton.cdiv(4 * dim, _TERMS_BLOCK),)](
        fn, terms, fn.stride(0), WIDTH=4 * dim, BLOCK=_TERMS_BLOCK, PARTIALS=PARTIALS, num_warps=_EXPAND_WARPS
    )
    _mhc_project_kernel[(triton.cdiv(tokens, rows), splits)](
        out, terms, partial, tokens, share,
        WIDTH=4 * dim, ROWS=rows, BLOCK=_BLOCK, PARTIALS=PARTIALS, num_warps=rows // 16, num_stages=_STAGES,
    )  # fmt: skip
    return partial, splits


def finish(
    partial, splits, scale, base, weight, post, comb, pre, layer_input, rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps,
    tokens, turns, chunks,
) -> None:  # fmt: skip
    """Fill the coefficients from `expand_and_project`'s partials, and give `layer_input` its norm if `chunks` is not 0."""
    dim = layer_input.shape[1]
    _mhc_finish_long_kernel[(triton.cdiv(tokens, _TOKENS) + tokens * chunks,)](
        partial, scale, base, weight, post, comb, pre, layer_input,
        rms_eps, pre_eps, sinkhorn_eps, post_alpha, norm_eps, tokens, splits, turns,
        D=dim, CHUNK=CHUNK, PARTIALS=PARTIALS, TOKENS=_TOKENS, SQUARES=triton.next_power_of_2(triton.cdiv(dim, CHUNK)),
        num_warps=_EXPAND_WARPS,
    )  # fmt: skip


_EXPAND = {
    "y_ptr": "*bf16:16", "streams_ptr": "*bf16:16", "post_ptr": "*fp32:16", "comb_ptr": "*fp32:16",
    "pre_mix_ptr": "*fp32:16", "out_ptr": "*bf16:16", "input_ptr": "*bf16:16", "aux_ptr": "*bf16:16",
    "partial_ptr": "*fp32:16", "stride_y_tok": "i32:16", "stride_streams_tok": "i32:16", "stride_streams": "i32:16",
    "stride_post_tok": "i32", "stride_post": "i32", "stride_comb_tok": "i32:16", "stride_comb": "i32",
    "stride_pre_tok": "i32", "tokens": "i32",
}  # fmt: skip
_TERMS = {"fn_ptr": "*fp32:16", "terms_ptr": "*bf16:16", "stride_fn": "i32:16"}
_PROJECT = {
    "streams_ptr": "*bf16:16", "terms_ptr": "*bf16:16", "partial_ptr": "*fp32:16", "tokens": "i32", "share": "i32",
}
# Of both kernels that finish.
FINISH_TYPES = {
    **{f"{name}_ptr": "*fp32:16" for name in ("partial", "scale", "base", "post", "comb", "pre")},
    "weight_ptr": "*bf16:16", "input_ptr": "*bf16:16",
    **dict.fromkeys(("rms_eps", "pre_eps", "sinkhorn_eps", "post_alpha", "norm_eps"), "fp32"),
    **dict.fromkeys(("tokens", "splits", "turns"), "i32"),
}  # fmt: skip
COMPILES = (
    *(
        Launch(
            _mhc_expand_kernel, _EXPAND, {"D": 5120, "PRE": True, "AUX": aux, "BLOCK": CHUNK, "PARTIALS": PARTIALS},
            num_warps=_EXPAND_WARPS, fp_fusion=False,
        )
        for aux in (False, True)
    ),
    Launch(
        _mhc_terms_kernel, _TERMS, {"WIDTH": 4 * 5120, "BLOCK": _TERMS_BLOCK, "PARTIALS": PARTIALS}, num_warps=_EXPAND_WARPS
    ),
    *(
        Launch(
            _mhc_project_kernel, _PROJECT, {"WIDTH": 4 * 5120, "ROWS": rows, "BLOCK": _BLOCK, "PARTIALS": PARTIALS},
            num_warps=rows // 16, num_stages=_STAGES,
            shared_reason="three stages of 128 tokens and three terms, 16 and 12 KiB each" if rows > 64 else "",
        )
        for rows in (64, 128)
    ),
    Launch(
        _mhc_finish_long_kernel, FINISH_TYPES,
        {"D": 5120, "CHUNK": CHUNK, "PARTIALS": PARTIALS, "TOKENS": _TOKENS, "SQUARES": 8}, num_warps=_EXPAND_WARPS,
    ),
)  # fmt: skip
