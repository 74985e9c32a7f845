# SPDX-License-Identifier: Apache-2.0
"""Attention over gathered rows against attention over the pages that they were gathered from, and against a softmax written out."""

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.attention.sparse_mla_prefill import OP as PAGES
from vllm.ampere.kernels.attention.sparse_mla_rows import OP, sparse_mla_rows
from vllm.ampere.kernels.kv_cache.gather_dequant import gather_dequant_slots


@pytest.mark.parametrize("case", PAGES.cases, ids=lambda case: case.name)
def test_gathered_rows_give_what_the_pages_give(case):
    given = case.inputs(seed=8)
    rows, lists, before = [], [], 0
    for source in ("window", "compressed"):
        if f"{source}_cache" not in given:
            continue
        cache, slots = given[f"{source}_cache"], given[f"{source}_slots"]
        counted = torch.arange(slots.shape[1]) < given[f"{source}_lens"].unsqueeze(1)
        rows.append(gather_dequant_slots(cache, torch.arange(cache.shape[0] * cache.shape[1]), torch.bfloat16))
        lists.append(torch.where(counted & (slots >= 0), slots + before, -1))
        before += len(rows[-1])
    indices = torch.cat(lists, 1)
    lens = torch.full((len(indices),), indices.shape[1], dtype=torch.int32)
    got = OP.reference(given["q"], given["sink"], given["scale"], torch.cat(rows), indices, lens, dtype=torch.float64)
    torch.testing.assert_close(got, PAGES.reference(**given, dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", OP.cases[1:], ids=lambda case: case.name)
def test_softmax_written_out(case):
    given = case.inputs(seed=9)
    got = OP.reference(**given, dtype=torch.float64)
    for token, (listed, length) in enumerate(zip(given["indices"].tolist(), given["lens"].tolist())):
        keys = given["rows"][[row for row in listed[:length] if row >= 0]].double()
        logits = given["q"][token].double() @ keys.T * given["scale"]
        weights = torch.cat([logits, given["sink"].double()[:, None]], 1).softmax(1)[:, :-1]
        torch.testing.assert_close(got[token], weights @ keys, rtol=1e-9, atol=1e-9)


def test_a_list_of_another_type_is_refused():
    given = OP.cases[1].inputs(seed=1)
    with pytest.raises(ContractError, match="sparse_mla_rows: indices"):
        sparse_mla_rows(**given | {"indices": given["indices"].long()})
