# SPDX-License-Identifier: Apache-2.0
"""Rotate, quantise and store latent rows in the sliding-window cache.

One row is 584 bytes: 448 E4M3 codes in seven groups of 64, each with a power-of-two scale, and the 64
rotated dimensions in bfloat16. Within a page the values of all rows come first, then the scales
(`cache_layout.KV_RECORD`). Pages are views into packed blocks: their distance is `cache.stride(0)`.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import integers, kv_pages, normal, rope_table
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..quantization.triton_codec import float_to_e4m3, inverse_scale, magnitude_bits, power_of_two_byte
from ..registry import EXACT, Case, Implementation, Op
from ..triton_rope import load_pairs, load_turn, rotate_pairs
from .reference import window_insert_ref
from .triton_record import record_pointers

_NUM_WARPS = 1


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _window_insert_kernel(
    latent_ptr,
    cache_ptr,
    slots_ptr,
    positions_ptr,
    cos_sin_ptr,
    stride_latent_tok,
    stride_page,
    stride_cos_sin,
    page_rows,
    ratio,
):
    """One program owns one slot; a group's row is stored by the token that closes it, rotated at its first one."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    # Seven groups, and the rotary dimensions in the eighth place, masked. Read beside the slot, not after it, stored or not.
    row_ptr = latent_ptr + token * stride_latent_tok
    offs_group, offs_d = tl.arange(0, 8), tl.arange(0, 64)
    is_nope = (offs_group < 7)[:, None]
    offs = offs_group[:, None] * 64 + offs_d[None, :]
    x = tl.load(row_ptr + offs, mask=is_nope, other=0.0).to(tl.float32)
    even, odd = load_pairs(row_ptr + 448 + offs_d[None, :], offs_d[None, :] < 64, 1)
    if (slot >= 0) & ((position + 1) % ratio == 0):
        data_ptr, scale_ptr = record_pointers(cache_ptr, slot, stride_page, page_rows)
        cos, sin = load_turn(cos_sin_ptr + position // ratio * ratio * stride_cos_sin)
        byte = power_of_two_byte(tl.max(magnitude_bits(x), 1))
        tl.store(data_ptr + offs, float_to_e4m3(x * inverse_scale(byte)[:, None]), mask=is_nope)
        tl.store(scale_ptr + offs_group, tl.where(offs_group < 7, byte, 0).to(tl.uint8))
        rope_ptr = (data_ptr + 448).to(tl.pointer_type(tl.bfloat16))
        tl.store(rope_ptr + offs_d[None, :], rotate_pairs(even, odd, cos[None, :], sin[None, :]).to(tl.bfloat16))


def insert_rows_triton(latent, cache, slots, positions, cos_sin, ratio: int) -> None:
    """Both writers: `compressor_insert`, and with ratio 1 `window_insert`."""
    if len(slots):
        _window_insert_kernel[(len(slots),)](
            latent,
            cache,
            slots,
            positions,
            cos_sin,
            latent.stride(0),
            cache.stride(0),
            cos_sin.stride(0),
            cache.shape[1],
            ratio,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )


def _window_insert_triton(kv, cache, slots, positions, cos_sin):
    insert_rows_triton(kv, cache, slots, positions, cos_sin, 1)


COMPILES = tuple(
    Launch(
        _window_insert_kernel,
        {
            "latent_ptr": "*bf16:16",
            "cache_ptr": "*u8:16",
            "slots_ptr": "*i64",
            "positions_ptr": "*i64",
            "cos_sin_ptr": "*fp32:16",
            "stride_latent_tok": "i32:16",
            "stride_page": "i32:16",
            "stride_cos_sin": "i32:16",
            "page_rows": "i32:16",
            **({"ratio": "i32"} if ratio > 1 else {}),
        },
        {} if ratio > 1 else {"ratio": 1},
        num_warps=_NUM_WARPS,
        fp_fusion=False,
    )
    for ratio in (1, 2)
)


def window_insert(
    kv: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    implementation: str | None = None,
) -> None:
    """Store the latent of each token in its slot of the window cache.

    Axes: T rows of latent, S slots (S <= T), L positions given (S <= L), B pages, P rows a page, M
    positions in the table.

    Args:
        kv: bfloat16 [T, 512], normalised, not rotated; rows S and beyond are padding and not read.
        cache: uint8 [B, P, 584], each page dense, pages `stride(0)` bytes apart; written in place.
        slots: int64 [S], slots of the cache, each in [0, B*P) and given once; negative: not stored.
        positions: int64 [L], tokens, each in [0, M) where the slot is not negative.
        cos_sin: float32 [M, 64]: 32 cosines then 32 sines.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        None. Stored rows hold 448 codes, 64 rotated dimensions, 7 scale bytes and one zero byte; no
        other byte of the cache changes.

    Numerics: float32 rotation, one rounding to bfloat16; codes and scale bytes as `e4m3_encode` and
        `power_of_two_scale` define them. A group with an infinity or a NaN is stored with scale byte 255.
    Graph safety: allocates nothing, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or S > T or S > L.
    Source: model_spec sections 5 and 12; upstream_gates section 2.5; replaces `_C.fused_deepseek_v4_kv_rope_insert` and
        the cache half of `_C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`.
    """
    axes = OP.check(kv=kv, cache=cache, slots=slots, positions=positions, cos_sin=cos_sin)
    check_rows(OP.name, axes, "kv")
    OP.choose(cache.device, implementation)(kv, cache, slots, positions, cos_sin)


def check_rows(op: str, axes: dict[str, int], source: str) -> None:
    """Raise ContractError unless there is a row and a position for every slot."""
    slots, rows, positions = axes["S"], axes["T"], axes["L"]
    if slots > min(rows, positions):
        raise ContractError(
            f"{op}: slots has {slots} entries, more than the {rows} rows of {source} or the {positions} of positions"
        )


def insert_inputs(sizes, generator, device, source="kv"):
    """Inputs that both writers share: distinct slots, of which a few are -1."""
    tokens, pages, page_rows = sizes["T"], sizes["B"], sizes["P"]
    used = sizes["S"]
    slots = torch.randperm((pages - 1) * page_rows, generator=generator)[:used] + page_rows
    slots[torch.rand(used, generator=generator) < 0.1] = -1
    return {
        source: normal(generator, tokens, 512, device=device, scale=3.0),
        "cache": kv_pages(generator, pages, page_rows, sizes.get("stride"), device),
        "slots": slots.to(device),
        "positions": integers(generator, 0, 4096, tokens, device=device),
        "cos_sin": rope_table(4096, device=device),
    }


AXES = {
    "T": "rows of latent",
    "S": "slots",
    "L": "positions given",
    "B": "pages",
    "P": "rows a page",
    "M": "positions in the rotary table",
}
CACHE = Arg("cache", "B P 584", (torch.uint8,), contiguous="word pages")
SIZES = {
    "empty": {"T": 0, "S": 0, "B": 2, "P": 32},
    "one": {"T": 1, "S": 1, "B": 2, "P": 32},
    "padded": {"T": 40, "S": 33, "B": 4, "P": 32, "stride": 19008},
    "page128": {"T": 129, "S": 129, "B": 4, "P": 128},
}

OP = Op(
    name="window_insert",
    summary="Rotate, quantise and store latent rows in the sliding-window cache.",
    axes=AXES,
    inputs=(
        Arg("kv", "T 512", (torch.bfloat16,)),
        CACHE,
        Arg("slots", "S", (torch.int64,)),
        Arg("positions", "L", (torch.int64,)),
        Arg("cos_sin", "M 64", (torch.float32,)),
    ),
    outputs=(),
    reference=window_insert_ref,
    implementations=(Implementation("triton", _window_insert_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"cache": EXACT},
    cases=tuple(Case(name, sizes, insert_inputs) for name, sizes in SIZES.items()),
    bytes_moved=lambda s: s["S"] * (1024 + 584 + 16 + 256),
    flops=lambda s: s["S"] * (512 * 2 + 32 * 6),
    mutates=("cache",),
    replaces="torch.ops._C.fused_deepseek_v4_kv_rope_insert",
    source="12",
)
