# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.launch import unavailable
from vllm.ampere.kernels.moe.marlin_layout import unpack, unpack_scales
from vllm.ampere.kernels.moe.mxfp4_experts_decode import MAX_TOKENS, OP, faster_up_to, mxfp4_experts_decode
from vllm.ampere.kernels.moe.mxfp4_experts_triton import COMPILES, _splits
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.compile_check import build

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def matrix(words, scales):
    """[N, K] in float64 from Marlin's layout, nibble by nibble: where a lane of mma.m16n8k16 holds each value."""
    tiles, width = words.shape
    values = torch.zeros(width // 2, tiles * 16, dtype=torch.float64)
    for tile, row in enumerate(words.tolist()):
        for at, word in enumerate(row):
            block, lane, register = at // 128, at % 128 // 4, at % 4
            for nibble in range(8):
                code = word >> 4 * nibble & 15
                # Nibbles 0 to 3 are the first of two neighbouring inputs; their bits are (output + 8, input + 8).
                n = block * 64 + register * 16 + lane // 4 + 8 * (nibble >> 1 & 1)
                k = tile * 16 + lane % 4 * 2 + nibble // 4 + 8 * (nibble & 1)
                values[n, k] = -E2M1[code & 7] if code & 8 else E2M1[code]
    # Upstream's order of the scales: columns i, i + 8, ... of each 64, then the middle two of every four exchanged.
    order = [i + 8 * j for i in range(8) for j in range(8)]
    order = [order[p - p % 4 + (0, 2, 1, 3)[p % 4]] for p in range(64)]
    for group, row in enumerate(scales.tolist()):
        for at, byte in enumerate(row):
            n = at // 64 * 64 + order[at % 64]
            values[n, group * 32 : group * 32 + 32] *= math.ldexp(1.0, byte - 127)
    return values


def derived(given, t):
    """One token in float64, expert by expert; the padding of w2 is cut off."""
    x, limit = given["x"][t].double(), given["limit"]
    out = torch.zeros_like(x)
    for weight, e in zip(given["topk_weights"][t].double(), given["topk_ids"][t].tolist()):
        e = e if given["expert_map"] is None else int(given["expert_map"][e])
        if not 0 <= e < given["w13"].shape[0]:
            continue
        pairs = matrix(given["w13"][e], given["w13_scale"][e]) @ x
        gate, up = pairs[::2].clamp(max=limit), pairs[1::2].clamp(-limit, limit)
        down = matrix(given["w2"][e], given["w2_scale"][e])[:, : len(gate)]
        out += down @ (weight * gate / (1 + torch.exp(-gate)) * up)
    return out


@pytest.mark.parametrize("case", OP.cases[1:5], ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    mxfp4_experts_decode(**given)
    for t in range(0, len(given["x"]), 8):
        assert_close(given["out"][t], derived(given, t), OP.tolerances["out"], f"token {t}")


def test_every_place_of_a_tile_holds_one_value():
    """One nibble set at a time: unpacking moves it, and nothing else, to a place of its own."""
    seen = set()
    for at in range(128):
        for nibble in range(8):
            words = torch.zeros(1, 1, 128, dtype=torch.int64)
            words[0, 0, at] = 5 << 4 * nibble
            n, k = (unpack(words.int())[0] != 0).nonzero()[0].tolist()
            seen.add((n, k, int(unpack(words.int())[0, n, k])))
    assert seen == {(n, k, code) for n in range(64) for k in range(8) for code in (5, 80)}
    order = unpack_scales(torch.arange(64, dtype=torch.uint8)[None, None])
    assert sorted(order.flatten().tolist()) == list(range(64))


def test_experts_of_other_ranks_add_nothing():
    given = OP.cases[2].inputs(seed=3)
    for outside in (-1, 8, 2**31 - 1, -(2**31)):
        mxfp4_experts_decode(**given | {"topk_ids": torch.full_like(given["topk_ids"], outside)})
        assert not given["out"].any()


def test_ids_of_64_bits_are_the_same():
    given = OP.cases[4].inputs(seed=4)
    other = given | {"topk_ids": given["topk_ids"].long(), "out": torch.empty_like(given["out"])}
    mxfp4_experts_decode(**given)
    mxfp4_experts_decode(**other)
    assert given["out"].any() and torch.equal(given["out"], other["out"])


@pytest.mark.parametrize("programs, groups, splits", [
    (54, 160, 4), (108, 160, 2), (324, 160, 1), (80, 54, 2), (10, 9, 1),
])
def test_splits_fill_the_card_and_leave_each_slot_a_group(programs, groups, splits):
    assert _splits(programs, groups, 108) == splits


@pytest.mark.parametrize("width, spread, tokens", [
    (288, False, 1), (576, False, 1), (608, False, 0), (1152, False, 0), (2304, False, 0), (2304, True, 1), (288, True, 1),
])
def test_one_token_is_taken_from_marlin_where_that_was_faster(width, spread, tokens):
    assert faster_up_to(width, spread) == tokens <= MAX_TOKENS


@pytest.mark.compile
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.parametrize("architecture", ["sm80", "sm86"])
@pytest.mark.parametrize("launch", [COMPILES[0], COMPILES[2], COMPILES[-4]], ids=lambda launch: launch.name)
def test_weights_reach_the_tensor_cores_in_their_lanes(launch, architecture):
    """The layout is the operand's, so decoding exchanges nothing: butterflies are the reductions' alone.

    In the loop two tiles of 64 outputs are multiplied: four times 16 outputs by eight tokens each.
    """
    ptx = build(launch, architecture).ptx
    assert "shfl.sync.idx" not in ptx
    products = ptx.count("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    assert products == 8 * launch.constexprs["TOKENS"] // 8


@pytest.mark.parametrize("change, message", [
    ({"w13": lambda w: w.to(torch.uint8)}, "w13 is uint8, must be int32"),
    ({"w13": lambda w: w[:, :-2].contiguous()}, "w13 has 14 on axis 4[*]G, must be 16"),
    ({"w2": lambda w: w[:, :2].contiguous()}, "w2 has 2 on axis 2[*]H, must be 4"),
    ({"w2": lambda w: w[:, :2].contiguous(), "w2_scale": lambda w: w[:, :1].contiguous()}, "H is 1, must be at least"),
    ({"arrived": lambda a: a[:1000]}, "C is 1000, must be at least 1024"),
    ({"w13": lambda w: w.transpose(1, 2).contiguous().transpose(1, 2)}, "w13 must be contiguous"),
    ({"x": lambda x: x[:, :-32]}, "x has 224 on axis 64[*]G, must be a multiple of 64"),
    ({"x": lambda x: x.float()}, "x is float32, must be bfloat16"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        mxfp4_experts_decode(**given)


def test_more_than_16_tokens_are_refused():
    given = OP.cases[3].inputs()
    given |= {n: torch.cat([given[n], given[n][:1]]) for n in ("x", "topk_weights", "topk_ids", "out")}
    with pytest.raises(ContractError, match="T is 17, must be at most 16"):
        mxfp4_experts_decode(**given)
