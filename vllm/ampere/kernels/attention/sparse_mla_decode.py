# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention over 584-byte pages, for decode shapes.

A token attends to two lists of slots: its window in the layer's own cache, and the selected compressed rows
in the cache of its KV source. Key and value are the same dequantised row; one softmax runs over the union;
a per-head sink enters the denominator only:

    o_h = sum_k e^(l_hk - m) k / (sum_k e^(l_hk - m) + e^(sink_h - m)),   l_hk = scale * q_h . k

Decode means few tokens with long lists, split over the keys to fill the card and merged by
`merge_attn_states`; `sparse_mla_prefill` computes the same for many tokens.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import kv_pages, normal
from ..contracts import Arg
from ..launch import unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import sparse_mla_decode_ref
from .sparse_mla_triton import _sparse_mla_decode_triton


def sparse_mla_decode(
    q: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    window_cache: torch.Tensor,
    window_slots: torch.Tensor,
    window_lens: torch.Tensor,
    compressed_cache: torch.Tensor | None = None,
    compressed_slots: torch.Tensor | None = None,
    compressed_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attend from each token to its window and its selected compressed rows.

    Axes: T tokens, H query heads on this rank, B pages of P rows (window), W window entries, C pages of Q rows
    (compressed), K selected entries.

    Args:
        q: bfloat16 [T, H, 512], rotated.
        sink: float32 [H], logit of the sink, not scaled; finite or -inf (no sink).
        scale: factor of the logits, 512^-0.5 in this model.
        window_cache: uint8 [B, P, 584], each page dense, pages `stride(0)` bytes apart, a multiple of 4.
        window_slots: int32 [T, W], slots in [0, B*P), or negative: the entry does not count.
        window_lens: int32 [T], entries at and after this column do not count.
        compressed_cache: uint8 [C, Q, 584], as `window_cache`; None, with its two lists, for a window-only layer.
        compressed_slots: int32 [T, K], slots in [0, C*Q), or negative.
        compressed_lens: int32 [T].
        out: bfloat16 [T, H, 512], written in place of a new tensor.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, H, 512]; a token with no key holds zeros, under any sink. A slot listed twice counts twice.
        Rows that no entry selects are never read into a result, whatever bytes they hold.

    Numerics: float32 logits, softmax and accumulation, one rounding to bfloat16. The order of the keys changes
        the result by rounding only.
    Graph safety: allocates its result unless `out` is given, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a compressed argument without the other two.
    Source: model_spec section 5; upstream_gates section 2.2; replaces `flash_mla_with_kvcache`.
    """
    check_call(
        OP, q=q, sink=sink, window_cache=window_cache, window_slots=window_slots, window_lens=window_lens,
        compressed_cache=compressed_cache, compressed_slots=compressed_slots, compressed_lens=compressed_lens, out=out,
    )  # fmt: skip
    return OP.choose(q.device, implementation)(
        q,
        sink,
        scale,
        window_cache,
        window_slots,
        window_lens,
        compressed_cache,
        compressed_slots,
        compressed_lens,
        out,
    )


def check_call(op: Op, **given) -> None:
    """Check the arguments that decode and prefill share."""
    op.check(**given)
    missing = [n for n in ("compressed_cache", "compressed_slots", "compressed_lens") if given[n] is None]
    if 0 < len(missing) < 3:
        raise ContractError(f"{op.name}: {missing[0]} is missing, the other compressed arguments are given")


def make_inputs(sizes, generator, device):
    """Random caches and lists; about one entry in eight is -1, and the lengths vary."""
    tokens = sizes["T"]

    def source(name, page_rows, width):
        pages = 3 + width // page_rows
        order = torch.rand(tokens, (pages - 1) * page_rows, generator=generator).argsort(1)
        slots = order[:, :width].int() + page_rows
        slots[torch.rand(slots.shape, generator=generator) < 0.125] = -1
        lens = torch.randint(0, width + 1, (tokens,), generator=generator).int()
        return {
            f"{name}_cache": kv_pages(generator, pages, page_rows, device=device),
            f"{name}_slots": slots.to(device),
            f"{name}_lens": lens.to(device),
        }

    return {
        "q": normal(generator, tokens, sizes["H"], 512, device=device, scale=2.0),
        "sink": normal(generator, sizes["H"], dtype=torch.float32, device=device),
        "scale": 512**-0.5,
        **source("window", sizes["P"], sizes["W"]),
        **(source("compressed", sizes["Q"], sizes["K"]) if sizes["K"] else {}),
    }


def case(tokens: int, heads: int, window: int, selected: int, page_rows: int = 32, compressed_rows: int = 128) -> Case:
    """A case named after its sizes; `selected` 0 is a window-only layer."""
    sizes = {"T": tokens, "H": heads, "W": window, "K": selected, "P": page_rows, "Q": compressed_rows}
    return Case(f"t{tokens}_h{heads}_w{window}_k{selected}", sizes, make_inputs)


AXES = {
    "T": "tokens",
    "H": "query heads on this rank",
    "B": "pages of the window cache",
    "P": "rows a page of the window cache",
    "W": "window entries",
    "C": "pages of the compressed cache",
    "Q": "rows a page of the compressed cache",
    "K": "selected entries",
}
INPUTS = (
    Arg("q", "T H 512", (torch.bfloat16,)),
    Arg("sink", "H", (torch.float32,)),
    Arg("window_cache", "B P 584", (torch.uint8,), contiguous="word pages"),
    Arg("window_slots", "T W", (torch.int32,)),
    Arg("window_lens", "T", (torch.int32,)),
    Arg("compressed_cache", "C Q 584", (torch.uint8,), optional=True, contiguous="word pages"),
    Arg("compressed_slots", "T K", (torch.int32,), optional=True),
    Arg("compressed_lens", "T", (torch.int32,), optional=True),
    Arg("out", "T H 512", (torch.bfloat16,), optional=True),
)
OUTPUTS = (Arg("o", "T H 512", (torch.bfloat16,)),)
# The worst element may be off by one bfloat16 step of the largest value.
TOLERANCE = Tolerance(4e-3, 7e-2)


def bytes_moved(sizes) -> int:
    """Every selected row once for each token, queries and results once."""
    return sizes["T"] * ((sizes["W"] + sizes["K"]) * (584 + 4) + sizes["H"] * 512 * 4)


def flops(sizes) -> int:
    """Two matrix products of 512 over the selected rows."""
    return 4 * 512 * sizes["T"] * sizes["H"] * (sizes["W"] + sizes["K"])


OP = Op(
    name="sparse_mla_decode",
    summary="Attend from each token to its window and its selected compressed rows, decode shapes.",
    axes=AXES,
    inputs=INPUTS,
    outputs=OUTPUTS,
    reference=sparse_mla_decode_ref,
    implementations=(Implementation("triton", _sparse_mla_decode_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"o": TOLERANCE},
    cases=(case(0, 8, 128, 512), case(1, 8, 128, 512), case(6, 16, 133, 64, 64, 64), case(33, 8, 128, 0)),
    bytes_moved=bytes_moved,
    flops=flops,
    replaces="vllm.v1.attention.ops.flashmla.flash_mla_with_kvcache",
    source="5",
)
