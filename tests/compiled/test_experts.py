# SPDX-License-Identifier: Apache-2.0
"""The experts' Triton kernels beside their reference; `tests/gpu/test_experts.py` runs the same on a card."""

import pytest
import torch

from vllm.ampere.kernels.moe import clamped_swiglu, mxfp4_experts_decode, mxfp4_experts_triton
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.parity import assert_parity, assert_same_bits, produce

OP = mxfp4_experts_decode.OP


def moved(given, device):
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}


def sized(seed, **sizes):
    case = OP.cases[1]
    return type(case)("x", case.sizes | sizes, case.make).inputs(seed)


def run(given, device):
    """What the kernels write, from fresh copies, brought back."""
    fresh = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    return {n: t.cpu() for n, t in produce(OP, OP.implementations[0].function, moved(fresh, device)).items()}


def reference(given):
    return produce(OP, OP.reference, given | {"out": given["out"].clone()})


@pytest.fixture(params=[1, 2, 4])
def splits(request, monkeypatch):
    monkeypatch.setattr(mxfp4_experts_triton, "_splits", lambda *counts: request.param)
    return request.param


@pytest.mark.parametrize("sizes", [{"T": 1}, {"T": 9, "K": 3}, {"T": 5, "R": 2, "K": 4}])
def test_splits_give_the_reference_and_leave_the_counters_zero(splits, sizes, device):
    given = sized(11, **sizes)
    got = run(given, device)
    assert_parity(OP, got, reference(given), f"{splits} splits")
    assert_same_bits(run(given, device), got)


@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 8, 9, 12, 15, 16])
def test_every_number_of_tokens(tokens, device):
    """Of a batch whose tokens share experts, and of one where all choose the same."""
    given = sized(12, T=tokens, D=128, I=64, K=3, E=5)
    assert_parity(OP, run(given, device), reference(given), f"{tokens} tokens")
    given["topk_ids"][:] = given["topk_ids"][:1]
    assert_parity(OP, run(given, device), reference(given), f"{tokens} tokens, the same experts")


def test_padding_and_other_experts_are_not_read(device):
    """NaN scales (255 doubles as infinity here) in the padding of w2 and in every expert that nobody chose."""
    given = sized(13, T=3, E=8, K=2, I=96)
    given["topk_ids"] = torch.tensor([[1, 6], [6, -1], [8, 1]], dtype=torch.int32)
    want = run(given, device)
    unchosen = [0, 2, 3, 4, 5, 7]
    assert (given["w2_scale"][:, 3:] == 255).all()
    given["w13_scale"][unchosen], given["w2_scale"][unchosen] = 255, 255
    assert_same_bits(run(given, device), want)
    assert want["out"].isfinite().all() and want["out"].any()


def test_weights_of_experts_elsewhere_do_not_matter(device):
    given = sized(14, T=4, E=8, K=3)
    given["topk_ids"][:, 1] = -1
    want = run(given, device)
    given["topk_weights"][:, 1] = torch.nan
    assert_same_bits(run(given, device), want)


def with_traps(op, given, device):
    """(what the reference, the kernels write), where an entry before the map and its last name an expert here: what
    id -1 would read."""
    given["expert_map"][-1] = 0
    want = produce(op, op.reference, given | {"out": given["out"].clone()})
    fresh = moved(given | {"out": given["out"].clone()}, device)
    fresh["expert_map"] = torch.cat([fresh["expert_map"][-1:], fresh["expert_map"]])[1:]
    got = produce(op, op.implementations[0].function, fresh)
    return want, {n: t.cpu() for n, t in got.items()}


def test_padding_rows_choose_no_expert(device):
    """Upstream's router gives -1 to the padding of a graph, and captures every graph as padding alone."""
    for tokens in (1, 9):
        given = sized(19, T=tokens, E=4, K=2, R=2)
        given["topk_ids"][-1] = -1
        want, got = with_traps(OP, given, device)
        assert_parity(OP, got, want, f"{tokens} tokens")
        assert not got["out"][-1].any() and got["out"][:-1].any() == (tokens > 1)


def test_nan_stays_in_its_token(device):
    given = sized(15, T=6, E=4, K=2, D=256)
    given["topk_ids"] = given["topk_ids"].clamp(0, 3)
    clean = run(given, device)["out"]
    given["x"][4, 7] = torch.nan
    got = run(given, device)["out"]
    others = torch.arange(6) != 4
    assert torch.equal(got[others], clean[others]) and got[4].isnan().all()


def test_activations_of_any_size(device):
    """Decoding happens far below 1; neither small nor large activations lose digits by it."""
    given = sized(16, T=2, E=4, K=2) | {"limit": float("inf")}
    given["topk_ids"] = given["topk_ids"].clamp(0, 3)
    for size in (2.0**-40, 2.0**20):
        scaled = given | {"x": (given["x"].float() * size).bfloat16()}
        got, want = run(scaled, device)["out"], reference(scaled)["out"]
        assert_close(got, want, OP.tolerances["out"], f"activations of {size}")
        assert want.abs().max() > 0


def test_every_code_is_exact(device):
    """One input after the other is 1: gate and up then are single weights, in every place of a tile."""
    given = sized(17, T=16, E=1, D=192, I=32, K=1) | {"limit": float("inf")}
    given["topk_ids"].zero_()
    given["topk_weights"].fill_(1.0)
    given["w13_scale"].fill_(127)
    for first in (0, 16, 128):
        given["x"].zero_()
        given["x"][torch.arange(16), first + torch.arange(16)] = 1.0
        assert_close(run(given, device)["out"], reference(given)["out"], OP.tolerances["out"], f"inputs from {first}")


def test_activation_rows_of_other_ranks_are_left_alone(device):
    op = clamped_swiglu.OP
    given = op.cases[3].inputs(18)
    given["gate_up"][given["expert_map"][given["topk_ids"].long()] < 0] = torch.nan
    want = produce(op, op.reference, given | {"out": given["out"].clone()})
    for ids in (given["topk_ids"], given["topk_ids"].long()):
        fresh = moved(given | {"topk_ids": ids, "out": given["out"].clone()}, device)
        got = produce(op, op.implementations[0].function, fresh)
        assert_parity(op, {n: t.cpu() for n, t in got.items()}, want)
    assert want["out"].isnan().any(1).sum() == (given["expert_map"][given["topk_ids"].long()] < 0).sum() > 0


def test_activation_rows_of_padding_are_left_alone(device):
    op = clamped_swiglu.OP
    given = op.cases[3].inputs(20)
    given["topk_ids"][::2] = -1
    want, got = with_traps(op, given, device)
    assert_parity(op, got, want)
    assert got["out"][::2].isnan().all() and not got["out"][1::2].isnan().all()
