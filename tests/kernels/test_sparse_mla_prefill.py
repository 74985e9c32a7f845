# SPDX-License-Identifier: Apache-2.0
"""Prefill against decode; what they share is tested in test_sparse_mla_decode.py."""

import pytest
import torch

from vllm.ampere.kernels.attention import sparse_mla_decode, sparse_mla_prefill
from vllm.ampere.testing.compare import assert_close


@pytest.mark.parametrize("case", sparse_mla_prefill.OP.cases, ids=lambda c: c.name)
def test_prefill_and_decode_agree(case):
    given = case.inputs(seed=21)
    prefill = sparse_mla_prefill.sparse_mla_prefill(**given)
    decode = sparse_mla_decode.sparse_mla_decode(**given)
    assert_close(prefill, decode, sparse_mla_decode.TOLERANCE, case.name)


def test_chunks_do_not_change_a_bit():
    given = sparse_mla_prefill.OP.cases[1].inputs(seed=22)
    whole = sparse_mla_prefill.sparse_mla_prefill(**given)
    per_token = [n for n in given if n == "q" or n.endswith(("_slots", "_lens"))]
    for size in (1, 30, 64):
        parts = [
            sparse_mla_prefill.sparse_mla_prefill(**(given | {n: given[n][a : a + size] for n in per_token}))
            for a in range(0, 65, size)
        ]
        assert torch.equal(torch.cat(parts), whole)
