# SPDX-License-Identifier: Apache-2.0
"""Marlin's layout of an MXFP4 matrix, taken apart in PyTorch and, for tensor cores, in registers.

A matrix of N outputs and K inputs lies as int32 [K/16, 2*N]. 16 inputs of 64 outputs are 128 words in a row, 512 bytes;
lane l = 4*i + t of a warp owns words 4*l to 4*l + 3. Word j of them holds, with b and h from 0 to 1 and o from 0 to 1,

    output n = 16*j + 8*b + i,  input k = 8*h + 2*t + o,  in the bits 4*(4*o + 2*b + h) and up.

That is the left operand of mma.m16n8k16: four words are 64 outputs, with no exchange between lanes. Scales lie as
uint8 [K/32, N], the 64 of a block in the order 8*i + 4*(j // 2) + 2*b + j % 2.
"""

import torch

from ..launch import tl, triton

# An E2M1 code moved into a bfloat16's fields reads as value * 2^-126. Activations are multiplied by 2^64 before the
# product, so that it keeps its digits, and sums by 2^62 after it: both exact.
ACTIVATION_FACTOR = tl.constexpr(2.0**64)
SUM_FACTOR = tl.constexpr(2.0**62)


def unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [E, K/16, 2*N], as Marlin repacks -> uint8 [E, N, K/2], as a checkpoint has it. 64 must divide N."""
    experts, tiles, width = words.shape
    shift = 4 * torch.arange(8, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shift & 15).view(experts, tiles, width // 128, 8, 4, 4, 2, 2, 2)
    # expert, tile, block, i, t, j, o, b, h -> expert, block, j, b, i, tile, h, t, o
    codes = codes.permute(0, 2, 5, 7, 3, 1, 8, 4, 6).reshape(experts, width // 2, tiles * 8, 2)
    return (codes[..., 0] | codes[..., 1] << 4).to(torch.uint8)


def unpack_scales(scales: torch.Tensor) -> torch.Tensor:
    """uint8 [E, K/32, N], as Marlin permutes -> uint8 [E, N, K/32]. 64 must divide N."""
    experts, groups, outputs = scales.shape
    parts = scales.view(experts, groups, outputs // 64, 8, 2, 2, 2)
    # expert, group, block, i, j // 2, b, j % 2 -> expert, block, j // 2, j % 2, b, i, group
    return parts.permute(0, 2, 4, 6, 5, 3, 1).reshape(experts, outputs, groups)


@triton.jit
def _two_codes(words):
    """The codes in bits 12 to 15 and 28 to 31 as two bfloat16 of value * 2^-126."""
    return (words & 0x80008000) | ((words & 0x70007000) >> 6)


@triton.jit
def _half_word(bits):
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode_tile(words):
    """int32 [S, 128] -> bfloat16 [S, 64, 16] of value * 2^-126; input 4*t + 2*h + o in place of 8*h + 2*t + o."""
    slots: tl.constexpr = words.shape[0]
    w = words.to(tl.uint32, bitcast=True)
    twos = tl.join(tl.join(_two_codes(w << 12), _two_codes(w << 8)), tl.join(_two_codes(w << 4), _two_codes(w)))
    codes = tl.join(_half_word(twos & 0xFFFF), _half_word(twos >> 16))
    # slot, i, t, j, h, b, o -> slot, j, b, i, t, h, o
    codes = tl.permute(tl.reshape(codes, (slots, 8, 4, 4, 2, 2, 2)), (0, 3, 5, 1, 2, 4, 6))
    return tl.reshape(codes, (slots, 64, 16))


@triton.jit
def decode_scales(words):
    """int32 [S, 16], the 64 scale bytes of a block -> float32 [S, 64]: 2^(byte - 127), 0 for byte 0."""
    slots: tl.constexpr = words.shape[0]
    w = words.to(tl.uint32, bitcast=True)
    low = tl.join(w << 23, (w >> 8) << 23)
    high = tl.join((w >> 16) << 23, (w >> 24) << 23)
    factors = (tl.join(low, high) & 0x7F800000).to(tl.float32, bitcast=True)
    # slot, i, j // 2, j % 2, b -> slot, j // 2, j % 2, b, i
    factors = tl.permute(tl.reshape(factors, (slots, 8, 2, 2, 2)), (0, 2, 3, 4, 1))
    return tl.reshape(factors, (slots, 64))


@triton.jit
def natural_input(k):
    """Place of input k of `decode_tile` among the 16 of its tile."""
    return k // 2 % 2 * 8 + k // 4 * 2 + k % 2


@triton.jit
def decoded_place(k):
    """The inverse of `natural_input`."""
    return k % 8 // 2 * 4 + k // 8 * 2 + k % 2


@triton.jit
def group_product(low, high, scales, x_low, x_high):
    """A group of 32 inputs, 64 outputs and T tokens a slot: float32 [S, 64, T] of product * 2^-62.

    Args:
        low, high: int32 [S, 128], the group's two tiles.
        scales: int32 [S, 16].
        x_low, x_high: bfloat16 [S, 16, T], activations * 2^64 in the order of `decode_tile`.
    """
    product = tl.dot(decode_tile(high), x_high, tl.dot(decode_tile(low), x_low))
    return product * decode_scales(scales)[:, :, None]
