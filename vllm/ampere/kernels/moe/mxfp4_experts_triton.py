# SPDX-License-Identifier: Apache-2.0
"""The two kernels of `mxfp4_experts_decode`.

The weights are the left operand of the tensor cores and up to 16 tokens the right one, 8 where there are 8. Each warp
of a program, a slot, takes every n-th group of 32 inputs, and the slots are summed at the end. Where programs are
few the inputs are split further over programs; the last one to arrive sums all in order, so that the bits are the
same every time. A program of the first kernel owns 64 columns, 32 pairs of gate and up, of one expert: the first of
the (token, choice) pairs that chose it works, for all of its tokens. It multiplies by the router's weight, so the down
projection is one long product over (expert, input), of which a program of the second kernel owns 64 columns.
"""

import torch

from ... import arch
from ...expert_layout import down_inputs
from ..launch import Launch, tl, triton
from .clamped_swiglu import clamped_silu_product
from .marlin_layout import ACTIVATION_FACTOR, SUM_FACTOR, decoded_place, group_product, natural_input

MAX_TOKENS = 16
# The down projection's loads follow the job list, which takes the first of its stages.
_SLOTS, _STAGES, _DOWN_STAGES = 8, 3, 5
# Programs that a launch aims at, for each multiprocessor.
_WAVES, _MAX_SPLITS = 2, 4


@triton.jit
def _local_experts(ids_ptr, map_ptr, at, inside, MAPPED: tl.constexpr):
    """Numbers of experts on this rank; negative or too large where the expert is another rank's or nobody's."""
    ids = tl.load(ids_ptr + at, inside, other=0).to(tl.int32)
    if MAPPED:
        ids = tl.load(map_ptr + ids, inside & (ids >= 0), other=-1)
    return tl.where(inside, ids, -1)


@triton.jit
def _sum_of_splits(sums, partial_ptr, arrived_ptr, home, split, live, TOKENS: tl.constexpr, SPLITS: tl.constexpr):
    """(whether this program arrived last, the sums [64, TOKENS] of all splits, in order, if it did)."""
    n, token = tl.arange(0, 64)[:, None], tl.arange(0, TOKENS)[None, :]
    partial_ptr += home.to(tl.int64) * (SPLITS * TOKENS * 64) + token * 64 + n
    tl.store(partial_ptr + split * (TOKENS * 64), sums, live[None, :])
    tl.debug_barrier()
    last = tl.atomic_add(arrived_ptr + home, 1, sem="acq_rel") == SPLITS - 1
    if last:
        sums = tl.zeros([64, TOKENS], tl.float32)
        for other in range(SPLITS):
            part = tl.load(partial_ptr + other * (TOKENS * 64), live[None, :], other=0.0, cache_modifier=".cg")
            sums += part
        tl.store(arrived_ptr + home, 0)
    return last, sums


@triton.jit(
    do_not_specialize=["experts", "tokens", "limit"],
    do_not_specialize_on_alignment=["weights_ptr", "ids_ptr", "map_ptr"],
)
def _experts_gate_up_kernel(
    x_ptr, w13_ptr, scale_ptr, weights_ptr, ids_ptr, map_ptr, inner_ptr, jobs_ptr, partial_ptr, arrived_ptr,
    stride_x_tok, experts, tokens, limit,
    G: tl.constexpr, J: tl.constexpr, K: tl.constexpr, CHOICES: tl.constexpr, PAIRS: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, MAPPED: tl.constexpr,
):
    block, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = tl.arange(0, PAIRS)
    local = _local_experts(ids_ptr, map_ptr, at, at < tokens * K, MAPPED)
    here = (local >= 0) & (local < experts)
    expert = tl.sum(tl.where(at == pair, local, 0), 0)
    leads = (expert >= 0) & (expert < experts) & (tl.sum(((local == expert) & (at < pair)).to(tl.int32), 0) == 0)
    token, choice = tl.arange(0, TOKENS), tl.arange(0, CHOICES)
    chosen_at = token[:, None] * K + choice[None, :]
    inside = (token < tokens)[:, None] & (choice < K)[None, :]
    chosen = inside & (_local_experts(ids_ptr, map_ptr, chosen_at, inside, MAPPED) == expert)
    member = tl.sum(chosen.to(tl.int32), 1) > 0
    if (block == 0) & (split == 0):
        # The second kernel's list: expert, pair and members of each job, in the order of their first pairs.
        repeats = tl.zeros([PAIRS], tl.int32)
        for base in range(0, tokens * K, 16):
            before = base + tl.arange(0, 16)
            other = _local_experts(ids_ptr, map_ptr, before, before < tokens * K, MAPPED)
            repeats += tl.sum(((local[:, None] == other[None, :]) & (before[None, :] < at[:, None])).to(tl.int32), 1)
        first = (here & (repeats == 0)).to(tl.int32)
        if pair == 0:
            tl.store(jobs_ptr, tl.sum(first, 0))
        if leads:
            job_ptr = jobs_ptr + 1 + 3 * tl.sum(tl.where(at < pair, first, 0), 0)
            tl.store(job_ptr, expert)
            tl.store(job_ptr + 1, pair)
            tl.store(job_ptr + 2, tl.sum(member.to(tl.int32) << token, 0))
    if leads:
        slot, k = tl.arange(0, SLOTS), tl.arange(0, 16)
        word_ptr = w13_ptr + expert.to(tl.int64) * (256 * G * J) + block * 128 + tl.arange(0, 128)[None, :]
        factor_ptr = scale_ptr.to(tl.pointer_type(tl.int32)) + expert.to(tl.int64) * (16 * G * J)
        factor_ptr += block * 16 + tl.arange(0, 16)[None, :]
        row_ptr = x_ptr + natural_input(k)[None, :, None] + token.to(tl.int64)[None, None, :] * stride_x_tok
        acc = tl.zeros([SLOTS, 64, TOKENS], tl.float32)
        for step in tl.range(0, tl.cdiv(G, SLOTS * SPLITS), num_stages=STAGES):
            group = (step * SPLITS + split) * SLOTS + slot
            live = group < G
            tile_ptr = word_ptr + group[:, None] * (256 * J)
            low = tl.load(tile_ptr, live[:, None], other=0)
            high = tl.load(tile_ptr + 128 * J, live[:, None], other=0)
            scales = tl.load(factor_ptr + group[:, None] * (16 * J), live[:, None], other=0)
            asked = live[:, None, None] & member[None, None, :]
            x_low = tl.load(row_ptr + group[:, None, None] * 32, asked, other=0.0).to(tl.float32)
            x_high = tl.load(row_ptr + group[:, None, None] * 32 + 16, asked, other=0.0).to(tl.float32)
            x_low = (x_low * ACTIVATION_FACTOR).to(tl.bfloat16)
            x_high = (x_high * ACTIVATION_FACTOR).to(tl.bfloat16)
            acc += group_product(low, high, scales, x_low, x_high)
        sums = tl.sum(acc, 0)
        last = True
        if SPLITS > 1:
            last, sums = _sum_of_splits(
                sums, partial_ptr, arrived_ptr, pair * J + block, split, member, TOKENS, SPLITS
            )
        if last:
            weight = tl.sum(tl.where(chosen, tl.load(weights_ptr + chosen_at, inside, other=0.0), 0.0), 1)
            gate, up = tl.split(tl.permute(tl.reshape(sums * SUM_FACTOR, (32, 2, TOKENS)), (0, 2, 1)))
            y = clamped_silu_product(gate, up, limit) * weight[None, :] * ACTIVATION_FACTOR
            column = tl.arange(0, 32)
            place = block * 32 + column // 16 * 16 + decoded_place(column % 16)
            inner_row = (pair * TOKENS + token).to(tl.int64) * (32 * J)
            tl.store(inner_ptr + inner_row[None, :] + place[:, None], y.to(tl.bfloat16), member[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _experts_down_kernel(
    inner_ptr, w2_ptr, scale_ptr, jobs_ptr, out_ptr, partial_ptr, arrived_ptr, stride_out_tok, tokens,
    G: tl.constexpr, J: tl.constexpr, H: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr,
):
    block, split = tl.program_id(0), tl.program_id(1)
    slot, k, token = tl.arange(0, SLOTS), tl.arange(0, 16), tl.arange(0, TOKENS)
    groups = tl.load(jobs_ptr) * J
    word_ptr = w2_ptr + block * 128 + tl.arange(0, 128)[None, :]
    factor_ptr = scale_ptr.to(tl.pointer_type(tl.int32)) + block * 16 + tl.arange(0, 16)[None, :]
    place_ptr = inner_ptr + k[None, :, None] + token[None, None, :] * (32 * J)
    acc = tl.zeros([SLOTS, 64, TOKENS], tl.float32)
    for step in tl.range(0, tl.cdiv(groups, SLOTS * SPLITS), num_stages=STAGES):
        at = (step * SPLITS + split) * SLOTS + slot
        live = at < groups
        job_ptr, group = jobs_ptr + 1 + at // J * 3, at % J
        expert = tl.load(job_ptr, live, other=0).to(tl.int64)
        pair = tl.load(job_ptr + 1, live, other=0).to(tl.int64)
        members = tl.load(job_ptr + 2, live, other=0)
        tile_ptr = word_ptr + (expert * (H * 128 * G) + group * (128 * G))[:, None]
        low = tl.load(tile_ptr, live[:, None], other=0)
        high = tl.load(tile_ptr + 64 * G, live[:, None], other=0)
        scales = tl.load(factor_ptr + (expert * (H * 8 * G) + group * (8 * G))[:, None], live[:, None], other=0)
        row_ptr = place_ptr + (pair * (TOKENS * 32 * J) + group * 32)[:, None, None]
        asked = ((members[:, None] >> token[None, :]) & 1 != 0)[:, None, :]
        x_low = tl.load(row_ptr, asked, other=0.0)
        x_high = tl.load(row_ptr + 16, asked, other=0.0)
        acc += group_product(low, high, scales, x_low, x_high)
    sums, live = tl.sum(acc, 0), token < tokens
    last = True
    if SPLITS > 1:
        last, sums = _sum_of_splits(sums, partial_ptr, arrived_ptr, block, split, live, TOKENS, SPLITS)
    if last:
        column = block * 64 + tl.arange(0, 64)
        row = token.to(tl.int64) * stride_out_tok
        tl.store(out_ptr + row[None, :] + column[:, None], (sums * SUM_FACTOR).to(tl.bfloat16), live[None, :])


def _splits(programs: int, groups: int, multiprocessors: int) -> int:
    """Over how many programs the inputs are split: a power of two that leaves every slot a group."""
    splits = 1
    while splits < _MAX_SPLITS and 2 * splits * programs <= _WAVES * multiprocessors and 2 * splits * _SLOTS <= groups:
        splits *= 2
    return splits


def mxfp4_experts_decode_triton(
    x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, out, arrived, limit, expert_map=None
):  # fmt: skip
    tokens, k = topk_ids.shape
    if not tokens:
        return
    groups, inner_groups = x.shape[1] // 32, w13_scale.shape[2] // 64
    held = 8 if tokens <= 8 else MAX_TOKENS
    pairs, blocks = tokens * k, x.shape[1] // 64
    multiprocessors = arch.of_device(x.device).multiprocessors
    gate_splits = _splits(pairs * inner_groups, groups, multiprocessors)
    down_splits = _splits(blocks, inner_groups * min(k, w13.shape[0]), multiprocessors)
    inner = x.new_empty(pairs, held, 32 * inner_groups)
    jobs = topk_ids.new_empty(1 + 3 * pairs, dtype=torch.int32)
    homes = max(pairs * inner_groups * gate_splits * (gate_splits > 1), blocks * down_splits * (down_splits > 1))
    partial = x.new_empty(homes, held, 64, dtype=torch.float32)
    shared = {"TOKENS": held, "SLOTS": _SLOTS, "num_warps": _SLOTS}
    _experts_gate_up_kernel[(inner_groups, pairs, gate_splits)](
        x, w13, w13_scale, topk_weights, topk_ids, expert_map, inner, jobs, partial, arrived,
        x.stride(0), w13.shape[0], tokens, limit,
        G=groups, J=inner_groups, K=k, CHOICES=triton.next_power_of_2(k), PAIRS=triton.next_power_of_2(held * k),
        SPLITS=gate_splits, STAGES=_STAGES, MAPPED=expert_map is not None, **shared,
    )  # fmt: skip
    _experts_down_kernel[(blocks, down_splits)](
        inner, w2, w2_scale, jobs, out, partial, arrived, out.stride(0), tokens,
        G=groups, J=inner_groups, H=w2_scale.shape[1], SPLITS=down_splits, STAGES=_DOWN_STAGES, **shared,
    )  # fmt: skip


def _gate_up_launch(inner, k, held, splits, mapped=False):
    """At the released hidden size."""
    return Launch(
        _experts_gate_up_kernel,
        {
            "x_ptr": "*bf16:16", "w13_ptr": "*i32:16", "scale_ptr": "*u8:16", "weights_ptr": "*fp32", "ids_ptr": "*i32",
            "inner_ptr": "*bf16:16", "jobs_ptr": "*i32:16", "partial_ptr": "*fp32:16", "arrived_ptr": "*i32:16",
            "stride_x_tok": "i32:16", "experts": "i32", "tokens": "i32", "limit": "fp32",
            **({"map_ptr": "*i32"} if mapped else {}),
        },
        {
            "G": 160, "J": inner // 32, "K": k, "CHOICES": triton.next_power_of_2(k),
            "PAIRS": triton.next_power_of_2(held * k), "TOKENS": held, "SLOTS": _SLOTS, "SPLITS": splits,
            "STAGES": _STAGES, "MAPPED": mapped, **({} if mapped else {"map_ptr": None}),
        },
        num_warps=_SLOTS,
    )  # fmt: skip


def _down_launch(inner, held, splits):
    return Launch(
        _experts_down_kernel,
        {
            "inner_ptr": "*bf16:16", "w2_ptr": "*i32:16", "scale_ptr": "*u8:16", "jobs_ptr": "*i32:16",
            "out_ptr": "*bf16:16", "partial_ptr": "*fp32:16", "arrived_ptr": "*i32:16", "stride_out_tok": "i32:16",
            "tokens": "i32",
        },
        {
            "G": 160, "J": inner // 32, "H": down_inputs(inner) // 32, "TOKENS": held, "SLOTS": _SLOTS,
            "SPLITS": splits, "STAGES": _DOWN_STAGES,
        },
        num_warps=_SLOTS,
    )  # fmt: skip


COMPILES = (
    _gate_up_launch(288, 6, 8, 4),  # TP8: one token, six tokens, sixteen, and one of the draft
    _gate_up_launch(288, 6, 8, 1),
    _gate_up_launch(288, 6, 16, 1),
    _gate_up_launch(288, 3, 8, 4),
    _gate_up_launch(576, 6, 8, 2),  # TP4
    _gate_up_launch(2304, 6, 8, 1, mapped=True),  # EP8
    *(_down_launch(inner, held, 2) for inner, held in ((288, 8), (288, 16), (576, 8), (2304, 8))),
)
