# SPDX-License-Identifier: Apache-2.0
"""Run by test_upstream_parity.py in a process of its own: our references against upstream's Triton kernels.

Triton's interpreter must be chosen before Triton is imported, and its casts to bfloat16 and E4M3 are not exact:
here torch's take their place.
"""

import sys

import numpy
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from vllm.ampere.kernels.registry import all_ops
from vllm.models.deepseek_v41.common.ops import cache_utils, fused_compress_quant_cache
from vllm.v1.attention.backends.mla import sparse_swa

TORCH = {tl.bfloat16: torch.bfloat16, tl.float32: torch.float32, tl.float8e4nv: torch.float8_e4m3fn}
INTEGER = {2: (numpy.uint16, torch.uint16), 4: (numpy.uint32, torch.uint32), 1: (numpy.uint8, torch.uint8)}
stock_convert = interpreter._convert_float


def convert(values, source, target, rounding):
    if source not in TORCH or target not in TORCH:
        return stock_convert(values, source, target, rounding)
    bits, _ = INTEGER[TORCH[source].itemsize]
    x = torch.from_numpy(numpy.ascontiguousarray(values).view(bits).copy()).view(TORCH[source]).float()
    bits, integer = INTEGER[TORCH[target].itemsize]
    return x.to(TORCH[target]).view(integer).numpy().view(bits).reshape(numpy.shape(values))


interpreter._convert_float = convert


def request_of(query_start: torch.Tensor, tokens: int) -> torch.Tensor:
    return (
        torch.bucketize(torch.arange(tokens), query_start[1:], right=True).clamp_max(max(len(query_start) - 2, 0)).int()
    )


def combine_topk_swa(g):
    names = (
        "topk_rows",
        "query_start",
        "seq_lens",
        "gather_lens",
        "window",
        "ratio",
        "topk",
        "request_rows",
        "compressed_rows",
    )
    return cache_utils.combine_topk_swa_indices(*(g[n] for n in names))


def compressor_pool(g):
    out = torch.zeros(len(g["kv_score"]), 512, dtype=torch.bfloat16)
    requests = None if g["query_start"] is None else request_of(g["query_start"], len(out))
    fused_compress_quant_cache.fused_save_compress_norm(
        g["kv_score"], g["positions"], g["state"], g["slots"], g["query_start"], requests, g["norm_weight"], g["eps"],
        g["ratio"], out, g.get("prev_rows"), g.get("prev_row_indices"),
    )  # fmt: skip
    return (out,)


def compressor_insert(g):
    fused_compress_quant_cache.rope_quant_insert(
        g["latent"], g["positions"], g["cos_sin"], g["cache"], g["slots"], g["ratio"]
    )
    return ()


def gather_dequant(g):
    cache_utils.dequantize_and_gather_k_cache_triton(
        g["out"], g["cache"], g["seq_lens"], g["gather_lens"], g["block_table"], g["cache"].shape[1], g["offset"]
    )
    return ()


def topk_slots(g):
    """Upstream takes only what its indexer emits: rows that the token sees, then -1."""
    visible = ((g["positions"] + 1) // g["ratio"]).unsqueeze(-1)
    column = torch.arange(g["topk"].shape[1])
    seen = (column < visible.clamp_max(len(column) - 1)) & (g["request"] >= 0).unsqueeze(-1)
    g["topk"] = torch.where(seen, column.flip(0) % visible.clamp_min(1), -1).int()
    return cache_utils.compute_global_topk_indices_and_lens(
        g["topk"], g["request"].clamp_min(0), g["block_table"], g["page_rows"], g["request"] >= 0
    )


def window_slots(g):
    """Chunks of the case's size, one request each; the draft block's kernel where tokens see ahead."""
    tokens, width, requests = len(g["positions"]), g["window"], len(g["first"])
    lengths = torch.tensor([tokens // 2, tokens - tokens // 2, 0])
    query_start = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    owner = request_of(query_start, tokens)
    seq_lens = lengths.int() + torch.tensor([3, 211, 40], dtype=torch.int32)
    valid = g["request"] >= 0
    # Upstream counts below zero where a replay starts after the token.
    g["first"] = torch.minimum(g["first"], (seq_lens - lengths).int())
    g["positions"] = torch.arange(tokens) - query_start[owner] + seq_lens[owner] - lengths[owner]
    g["request"] = torch.where(valid, owner, -1)
    slots, lens = torch.zeros(tokens, 1, width, dtype=torch.int32), torch.zeros(tokens, dtype=torch.int32)
    shared = (query_start, seq_lens, owner, valid, g["block_table"], g["block_table"].stride(0), g["page_rows"])
    if "ahead" in g:
        block = int(lengths.max())
        g["window"], g["first"] = width - 5 + block, torch.zeros(requests, dtype=torch.int32)
        g["ahead"] = (seq_lens[owner] - 1 - g["positions"]).int()
        slots = torch.zeros(tokens, 1, g["window"], dtype=torch.int32)
        sparse_swa.ComputeDSparkNoncausalSWAIndicesKernel.kernel[(tokens,)](
            slots, slots.stride(0), lens, width - 5, g["window"], *shared, 0, TRITON_BLOCK_SIZE=1024
        )
    else:
        sparse_swa._compute_swa_indices_and_lens_kernel[(tokens,)](
            slots,
            slots.stride(0),
            lens,
            width,
            width,
            lens,
            lens,
            *shared,
            g["first"],
            0,
            HAS_IMAGE=False,
            TRITON_BLOCK_SIZE=1024,
        )
    return slots.flatten(1), lens


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of the storages, so that the bytes between strided pages count too."""
    a, b = (torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()) for t in (a, b))
    return torch.equal(a, b)


for upstream in (combine_topk_swa, compressor_pool, compressor_insert, gather_dequant, topk_slots, window_slots):
    op = all_ops()[upstream.__name__]
    compared = 0
    for case in op.cases:
        given, ours = case.inputs(seed=81), case.inputs(seed=81)
        if not all(given[a.name].numel() for a in op.inputs if given.get(a.name) is not None):
            continue
        want = upstream(given)
        ours |= {n: v for n, v in given.items() if n not in op.mutates}
        got = op.reference(**ours)
        got = () if got is None else got if isinstance(got, tuple) else (got,)
        pairs = [*zip(got, want), *((ours[n], given[n]) for n in op.mutates if given[n] is not None)]
        if not all(same_bytes(a, b) for a, b in pairs):
            sys.exit(f"{op.name} {case.name}: differs from upstream's kernel")
        compared += len(pairs)
    print(f"{op.name}: {compared} tensors equal")
