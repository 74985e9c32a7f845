# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered rows on a card: what the interpreter checks too, sizes of a prefill, and row numbers past 2^31 bytes."""

import pytest
import torch

from tests.interpreter import test_sparse_mla_rows as small
from vllm.ampere.kernels.attention.sparse_mla_rows import OP
from vllm.ampere.testing.compare import assert_close

pytestmark = pytest.mark.gpu
TRITON = OP.implementations[0].function


@pytest.fixture(autouse=True)
def on_the_card(monkeypatch):
    monkeypatch.setattr(small, "given", lambda *a, made=small.given, **named: made(*a, **named, device="cuda"))


test_no_row_gives_zeros = small.test_no_row_gives_zeros
test_lengths_past_the_list = small.test_lengths_past_the_list
test_a_nan_reaches_its_own_token_only = small.test_a_nan_reaches_its_own_token_only
test_heads_and_strided_queries = small.test_heads_and_strided_queries


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_a_long_chunk_and_a_token_alone_have_the_same_bits(heads):
    inputs = small.given(2_000, heads, 9_000, 640)
    whole = TRITON(**inputs)
    for part in (slice(0, 1), slice(700, 733)):
        some = inputs | {n: inputs[n][part] for n in ("q", "indices", "lens")}
        assert torch.equal(TRITON(**some), whole[part])
        want = OP.reference(**{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in some.items()})
        assert_close(whole[part].cpu(), want, OP.tolerances["o"])


def test_rows_past_two_to_the_31_bytes():
    inputs = small.given(5, 8, 300, 128)
    far = torch.full((2_200_000, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    far[-300:] = inputs["rows"]
    moved = torch.where(inputs["indices"] >= 0, inputs["indices"] + 2_200_000 - 300, -1)
    assert torch.equal(TRITON(**inputs | {"rows": far, "indices": moved}), TRITON(**inputs))
