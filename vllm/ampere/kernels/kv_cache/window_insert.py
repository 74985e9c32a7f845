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
from ..registry import EXACT, Case, Op
from .reference import window_insert_ref


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
CACHE = Arg("cache", "B P 584", (torch.uint8,), contiguous="pages")
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
    tolerances={"cache": EXACT},
    cases=tuple(Case(name, sizes, insert_inputs) for name, sizes in SIZES.items()),
    bytes_moved=lambda s: s["S"] * (1024 + 584 + 16 + 256),
    flops=lambda s: s["S"] * (512 * 2 + 32 * 6),
    mutates=("cache",),
    replaces="torch.ops._C.fused_deepseek_v4_kv_rope_insert",
    source="12",
)
