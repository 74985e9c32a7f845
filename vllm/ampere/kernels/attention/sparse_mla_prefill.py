# SPDX-License-Identifier: Apache-2.0
"""Sparse latent attention over 584-byte pages, for prefill shapes.

The contract of `sparse_mla_decode`, for many tokens with lists of their own: no split over the keys. It needs no
workspace and no plan of the host's, and decodes a row for every token that selects it: `sparse_mla_rows` is faster.
"""

import torch

from ..launch import unavailable
from ..registry import Implementation, Op
from .reference import sparse_mla_prefill_ref
from .sparse_mla_decode import AXES, INPUTS, OUTPUTS, TOLERANCE, bytes_moved, case, check_call, flops
from .sparse_mla_triton import _sparse_mla_prefill_triton


def sparse_mla_prefill(
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
        q, sink, scale: queries bfloat16 [T, H, 512], sinks float32 [H] and the factor of the logits, as in
            `sparse_mla_decode`.
        window_cache, window_slots, window_lens: uint8 [B, P, 584], int32 [T, W] and int32 [T], as there.
        compressed_cache, compressed_slots, compressed_lens: uint8 [C, Q, 584], int32 [T, K] and int32 [T], as
            there; all None for a window-only layer.
        out: bfloat16 [T, H, 512], written in place of a new tensor.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, H, 512]; a token with no key holds zeros, under any sink. A slot listed twice counts twice.

    Numerics: float32 logits, softmax and accumulation, one rounding to bfloat16.
    Graph safety: allocates its result unless `out` is given, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a compressed argument without the other two.
    Source: model_spec section 5; upstream_gates section 2.3; replaces `flash_mla_sparse_fwd` and the gather before it.
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


OP = Op(
    name="sparse_mla_prefill",
    summary="Attend from each token to its window and its selected compressed rows, prefill shapes.",
    axes=AXES,
    inputs=INPUTS,
    outputs=OUTPUTS,
    reference=sparse_mla_prefill_ref,
    implementations=(Implementation("triton", _sparse_mla_prefill_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"o": TOLERANCE},
    cases=(case(0, 8, 128, 64), case(5, 8, 40, 24), case(65, 8, 128, 64), case(40, 16, 128, 512), case(129, 8, 128, 0, 64)),
    bytes_moved=bytes_moved,
    flops=flops,
    replaces="vllm.v1.attention.ops.flashmla.flash_mla_sparse_fwd",
    source="5",
)
