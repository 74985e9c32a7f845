# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.kernels.attention.merge_attn_states import OP, merge_attn_states
from vllm.ampere.kernels.attention.reference import sparse_mla_decode_ref
from vllm.ampere.kernels.attention.sparse_mla_decode import case
from vllm.ampere.testing.compare import assert_close


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    """Numerators and denominators in Python floats, no maximum subtracted."""
    given = case.inputs(seed=51)
    splits, tokens, heads = given["lse"].shape
    want = torch.zeros(tokens, heads, 512, dtype=torch.float64)
    for t in range(tokens):
        for h in range(heads):
            full = [s for s in range(splits) if given["lse"][s, t, h] != -torch.inf]
            mass = [math.exp(given["lse"][s, t, h].item()) for s in full]
            total = sum(mass) + math.exp(given["sink"][h].item())
            for s, m in zip(full, mass):
                want[t, h] += given["partial"][s, t, h].double() * (m / total)
    assert_close(merge_attn_states(**given), want, OP.tolerances["o"])


def split(given: dict, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each slice of the window list without the sink, and its log denominator, in float64."""
    partial, lse = [], []
    for columns in torch.arange(given["window_slots"].shape[1]).chunk(parts):
        part = given | {
            "window_slots": given["window_slots"][:, columns],
            "window_lens": (given["window_lens"] - columns[0]).clamp_min(0).int(),
        }
        plain = sparse_mla_decode_ref(**(part | {"sink": torch.full((8,), -torch.inf)}), dtype=torch.float64)
        # With a sink the output shrinks by sum / (sum + e^sink), which gives the sum.
        shrunk = sparse_mla_decode_ref(**(part | {"sink": torch.zeros(8)}), dtype=torch.float64)
        ratio = shrunk.norm(dim=-1) / plain.norm(dim=-1)
        lse.append(torch.where(ratio.isnan(), -torch.inf, torch.log(ratio / (1 - ratio))))
        partial.append(plain)
    return torch.stack(partial).float(), torch.stack(lse).float()


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_split_attention_merges_to_the_whole(parts):
    given = case(6, 8, 64, 0).inputs(seed=52)
    given["window_lens"][0] = 0
    partial, lse = split(given, parts)
    assert parts == 1 or (lse == -torch.inf).any()
    assert_close(merge_attn_states(partial, lse, given["sink"]), sparse_mla_decode_ref(**given), OP.tolerances["o"])


def test_order_of_the_splits_does_not_matter():
    given = OP.cases[-1].inputs(seed=53)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    shuffled = given | {"partial": given["partial"][order], "lse": given["lse"][order]}
    assert_close(merge_attn_states(**shuffled), merge_attn_states(**given), OP.tolerances["o"])


def test_tokens_do_not_depend_on_their_batch():
    given = OP.cases[2].inputs(seed=54)
    alone = merge_attn_states(given["partial"][:, 3:4].contiguous(), given["lse"][:, 3:4].contiguous(), given["sink"])
    assert torch.equal(alone, merge_attn_states(**given)[3:4])


@pytest.mark.parametrize("sink", [-torch.inf, 0.0, 50.0])
def test_only_empty_splits_give_zeros(sink):
    nothing = merge_attn_states(
        torch.full((3, 2, 8, 512), torch.nan), torch.full((3, 2, 8), -torch.inf), torch.full((8,), sink)
    )
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_large_logarithms_do_not_overflow():
    partial = torch.randn(2, 1, 8, 512, generator=torch.Generator().manual_seed(1))
    lse = torch.stack([torch.full((1, 8), 500.0), torch.full((1, 8), 500.0)])
    got = merge_attn_states(partial, lse, torch.full((8,), 500.0))
    assert_close(got, partial.double().sum(0) / 3, OP.tolerances["o"])
