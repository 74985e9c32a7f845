# SPDX-License-Identifier: Apache-2.0
"""The 584-byte latent record in registers: where a slot's bytes are, and their numbers (`cache_layout.KV_RECORD`)."""

from ...cache_layout import KV_GROUP, KV_RECORD, NOPE_DIM, ROPE_DIM
from ..launch import tl, triton
from ..quantization.triton_codec import e4m3_words_to_half, ue8m0_to_float

DATA_BYTES = tl.constexpr(KV_RECORD.data_bytes)
SCALE_BYTES = tl.constexpr(KV_RECORD.scale_bytes)
GROUP = tl.constexpr(KV_GROUP)
NOPE = tl.constexpr(NOPE_DIM)
ROPE = tl.constexpr(ROPE_DIM)


@triton.jit
def record_pointers(cache_ptr, slots, stride_page, page_rows):
    """Pointers to the values and to the scales of slots (integers >= 0); pages are `stride_page` bytes apart."""
    page_ptr = cache_ptr + (slots // page_rows).to(tl.int64) * stride_page
    row = slots % page_rows
    return page_ptr + row * DATA_BYTES, page_ptr + page_rows * DATA_BYTES + row * SCALE_BYTES


@triton.jit
def load_codes(data_ptr, scale_ptr, counts, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of dimensions FIRST and on, none rotary, four in an int32, and scale bytes; 0 if not counted.

    FIRST and WIDTH are multiples of 64: int32 [rows, WIDTH / 4] and uint8 [rows, WIDTH / 64].
    """
    words_ptr = (data_ptr + FIRST).to(tl.pointer_type(tl.int32))
    words = tl.load(words_ptr[:, None] + tl.arange(0, WIDTH // 4)[None, :], mask=counts[:, None], other=0)
    offs_group = FIRST // GROUP + tl.arange(0, WIDTH // GROUP)
    return words, tl.load(scale_ptr[:, None] + offs_group[None, :], mask=counts[:, None], other=0)


@triton.jit
def decode_256th(words, scales, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """float32 [ROWS, WIDTH]: 1/256 of the numbers that `load_codes` loaded."""
    groups: tl.constexpr = WIDTH // GROUP
    halves = tl.reshape(e4m3_words_to_half(words, ROWS, WIDTH).to(tl.float32), (ROWS, groups, GROUP))
    return tl.reshape(halves * tl.reshape(ue8m0_to_float(scales), (ROWS, groups, 1)), (ROWS, WIDTH))


@triton.jit
def load_rope(data_ptr, counts):
    """bfloat16 [rows, 64]: the rotary dimensions; 0 if not counted."""
    rope_ptr = (data_ptr + NOPE).to(tl.pointer_type(tl.bfloat16))
    return tl.load(rope_ptr[:, None] + tl.arange(0, ROPE)[None, :], mask=counts[:, None], other=0.0)


@triton.jit
def copy_numbers(out_row_ptr, data_ptr, scale_ptr, counts, mask, ROWS: tl.constexpr):
    """Write the 512 numbers of each record to its row in memory, in that dtype; zeros in rows not counted."""
    dtype = out_row_ptr.dtype.element_ty
    out, mask = out_row_ptr[:, None], mask[:, None]
    codes_a, scales_a = load_codes(data_ptr, scale_ptr, counts, 0, 256)
    codes_b, scales_b = load_codes(data_ptr, scale_ptr, counts, 256, 128)
    codes_c, scales_c = load_codes(data_ptr, scale_ptr, counts, 384, 64)
    nope_a = decode_256th(codes_a, scales_a, ROWS, 256) * 256.0
    nope_b = decode_256th(codes_b, scales_b, ROWS, 128) * 256.0
    nope_c = decode_256th(codes_c, scales_c, ROWS, 64) * 256.0
    offs_64 = tl.arange(0, 64)[None, :]
    tl.store(out + tl.arange(0, 256)[None, :], nope_a.to(dtype), mask=mask)
    tl.store(out + 256 + tl.arange(0, 128)[None, :], nope_b.to(dtype), mask=mask)
    tl.store(out + 384 + offs_64, nope_c.to(dtype), mask=mask)
    tl.store(out + 448 + offs_64, load_rope(data_ptr, counts).to(dtype), mask=mask)
