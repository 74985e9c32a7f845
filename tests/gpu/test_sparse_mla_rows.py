# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered rows on a card: what is checked of compiled kernels on the CPU too, sizes of a prefill, and row
numbers past 2^31 bytes."""

import pytest
import torch

from tests.compiled.test_sparse_mla_rows import *  # noqa: F403
from tests.compiled.test_sparse_mla_rows import OP, given
from vllm.ampere.testing.compare import assert_close

pytestmark = pytest.mark.gpu


@pytest.fixture(params=OP.implementations, ids=lambda implementation: implementation.name)
def attend(request):
    if reason := request.param.requires():
        pytest.skip(reason)
    return request.param.function


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_a_long_chunk_and_a_token_alone_have_the_same_bits(device, attend, heads):
    inputs = given(device, 2_000, heads, 9_000, 640)
    whole = attend(**inputs)
    for part in (slice(0, 1), slice(700, 733)):
        some = inputs | {n: inputs[n][part] for n in ("q", "indices", "lens")}
        assert torch.equal(attend(**some), whole[part])
        want = OP.reference(**{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in some.items()})
        assert_close(whole[part].cpu(), want, OP.tolerances["o"])


def test_rows_past_two_to_the_31_bytes(device, attend):
    inputs = given(device, 5, 8, 300, 128)
    far = torch.full((2_200_000, 512), torch.nan, dtype=torch.bfloat16, device=device)
    far[-300:] = inputs["rows"]
    moved = torch.where(inputs["indices"] >= 0, inputs["indices"] + 2_200_000 - 300, -1)
    assert torch.equal(attend(**inputs | {"rows": far, "indices": moved}), attend(**inputs))
