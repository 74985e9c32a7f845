# SPDX-License-Identifier: Apache-2.0
"""Properties of the sparse attention kernel that its cases do not reach, in small."""

import pytest
import torch

from vllm.ampere.kernels.attention.reference import sparse_mla_decode_ref
from vllm.ampere.kernels.attention.sparse_mla_decode import TOLERANCE, case
from vllm.ampere.kernels.attention.sparse_mla_triton import attend
from vllm.ampere.testing.compare import assert_close

OPTIONAL = {"compressed_cache": None, "compressed_slots": None, "compressed_lens": None, "out": None}


def given(tokens=2, heads=8, window=40, selected=50):
    return OPTIONAL | case(tokens, heads, window, selected, 32, 64).inputs(seed=5)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_split_count_changes_the_result_by_rounding_only(heads, splits):
    inputs = given(heads=heads)
    inputs["window_lens"][:] = torch.tensor([40, 7])
    inputs["compressed_lens"][:] = torch.tensor([99, 33])
    assert_close(attend(**inputs, splits=splits), sparse_mla_decode_ref(**inputs), TOLERANCE)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sink", [0.0, 30.0, -torch.inf])
def test_no_key_gives_zeros(splits, sink):
    inputs = given(tokens=3)
    inputs["sink"].fill_(sink)
    inputs["window_lens"][:] = torch.tensor([0, 40, -1])
    inputs["window_slots"][1] = -1
    inputs["compressed_lens"][:] = torch.tensor([0, 50, 0])
    inputs["compressed_slots"][1] = -1
    assert not attend(**inputs, splits=splits).any()


@pytest.mark.parametrize("splits", [1, 3])
def test_selected_nan_reaches_its_own_token_only(splits):
    inputs = given(window=4, selected=0)
    inputs["window_lens"].fill_(4)
    inputs["window_slots"] = torch.tensor([[40, 41, 42, 43], [50, 51, 52, 53]], dtype=torch.int32)
    clean = attend(**inputs, splits=splits)
    inputs["window_cache"][1].view(-1)[(42 - 32) * 576] = 0x7F
    got = attend(**inputs, splits=splits)
    assert got[0].isnan().all() and torch.equal(got[1], clean[1])
