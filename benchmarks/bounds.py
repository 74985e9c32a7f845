# SPDX-License-Identifier: Apache-2.0
"""What no kernel of a shape can beat, timed as its rivals are: a launch, a launch that waits for memory, a copy."""

import torch

from vllm.ampere.kernels.launch import tl, triton
from vllm.ampere.kernels.registry import all_ops


@triton.jit
def _empty_kernel(out_ptr):
    """Nothing to do."""


@triton.jit
def _one_load_kernel(from_ptr, out_ptr):
    """A number from memory, and back: what the shortest kernel with an input waits for."""
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out_ptr + at, tl.load(from_ptr + at))


@triton.jit
def _copy_kernel(from_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(from_ptr + at, at < count), at < count)


def empty(given):
    """As many programs as `merge_attn_states` has."""
    tokens, heads = given["partial"].shape[1:3]
    out = torch.empty(1, device=given["partial"].device)
    return lambda: _empty_kernel[(tokens * heads,)](out), None


def one_load(given):
    """As many programs as `merge_attn_states` has, each 128 numbers of its input."""
    partial = given["partial"]
    programs = partial.shape[1] * partial.shape[2]
    out = torch.empty(programs * 128, device=partial.device)
    return lambda: _one_load_kernel[(programs,)](partial, out), None


def copy_of_rows(given):
    """As many bytes as `gather_dequant` moves."""
    return _copy("gather_dequant", {"lengths": given["seq_lens"].tolist(), "tail": None}, given["out"].device)


def copy_of_keys(given):
    """As many bytes as `key_norm_rope_store` moves."""
    return _copy("key_norm_rope_store", {"T": len(given["k"]), "ratio": given["ratio"]}, given["k"].device)


def _copy(op: str, sizes, device):
    """Half of an op's bytes read, as many written."""
    source = torch.zeros(all_ops()[op].bytes_moved(sizes) // 8, dtype=torch.int32, device=device)
    out, block = torch.empty_like(source), 4096
    grid = (triton.cdiv(len(source), block),)
    return lambda: _copy_kernel[grid](source, out, len(source), BLOCK=block, num_warps=8), None
