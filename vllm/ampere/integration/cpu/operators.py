# SPDX-License-Identifier: Apache-2.0
"""Compiled operators that upstream's model calls and the CPU build lacks, defined on the reference ops."""

import torch

from ...kernels.kv_cache.window_insert import window_insert
from ...kernels.rope import rotate_tail

_LIBRARIES: list[torch.library.Library] = []  # an operator lives as long as the library that defines it


def _insert(kv, cache, slots, positions, cos_sin, block_size) -> None:
    pages = cache.as_strided((cache.shape[0], block_size, 584), (cache.stride(0), 584, 1), cache.storage_offset())
    window_insert(kv, pages, slots, positions, cos_sin)


def _rope_query_insert_kv(
    q, kv, cache, slots, positions, cos_sin, padded_heads, eps, block_size, norm_q, mxfp8, rope_q, interleaved_q
):
    if norm_q or mxfp8 or interleaved_q or not rope_q or padded_heads != q.shape[1]:
        raise NotImplementedError("the CPU operator serves plain, unpadded queries and the 584-byte record only")
    _insert(kv, cache, slots, positions, cos_sin, block_size)
    return rotate_tail(q, positions, cos_sin).to(q.dtype)


def _rope_insert_kv(kv, cache, slots, positions, cos_sin, block_size, fp8_scale, mxfp8) -> None:
    if fp8_scale is not None or mxfp8:
        raise NotImplementedError("the CPU operator serves the 584-byte record only")
    _insert(kv, cache, slots, positions[: kv.shape[0]], cos_sin, block_size)


def _mm_wide(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.to(out_dtype) @ b.to(out_dtype)


def install() -> None:
    """Define the operators; a second call does nothing."""
    if _LIBRARIES:
        return
    library = torch.library.Library("_C", "FRAGMENT")
    library.define(
        "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(Tensor q, Tensor kv, Tensor(a!) cache, Tensor slots,"
        " Tensor positions, Tensor cos_sin, int padded_heads, float eps, int block_size, bool norm_q, bool mxfp8,"
        " bool rope_q, bool interleaved_q) -> Tensor"
    )
    library.define(
        "fused_deepseek_v4_kv_rope_insert(Tensor kv, Tensor(a!) cache, Tensor slots, Tensor positions,"
        " Tensor cos_sin, int block_size, Tensor? fp8_scale, bool mxfp8) -> ()"
    )
    library.impl("fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert", _rope_query_insert_kv, "CPU")
    library.impl("fused_deepseek_v4_kv_rope_insert", _rope_insert_kv, "CPU")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("mm.dtype", _mm_wide, "CPU")
    _LIBRARIES.extend((library, aten))
