# SPDX-License-Identifier: Apache-2.0
"""The edges of engram, routing and sampling on the card, and the engram table in host memory."""

import pytest
import torch

from tests.compiled.test_choices import *  # noqa: F403
from vllm.ampere.kernels.engram.engram_lookup import OP as ENGRAM_LOOKUP
from vllm.ampere.kernels.engram.engram_lookup import engram_lookup
from vllm.ampere.testing.inputs import card_view

pytestmark = pytest.mark.gpu


def test_table_in_host_memory():
    given = ENGRAM_LOOKUP.cases[-1].inputs(seed=6)
    want = engram_lookup(**given)
    pinned = {n: given[n].pin_memory() for n in ("table", "scales")}
    views = {n: card_view(t) for n, t in pinned.items()}
    assert all(v.data_ptr() == pinned[n].data_ptr() for n, v in views.items())
    got = engram_lookup(**given | views | {"rows": given["rows"].cuda()})
    torch.cuda.synchronize()
    assert torch.equal(got.cpu(), want)


def test_table_past_2_to_the_31_bytes():
    given = ENGRAM_LOOKUP.cases[-1].inputs(seed=7)
    want = engram_lookup(**given)
    count, far = given["table"].shape[0], 10_000_000
    table = torch.full((far + count, 256), 0x7F, dtype=torch.uint8, device="cuda")
    scales = torch.full((far + count, 8), 0xFF, dtype=torch.uint8, device="cuda")
    table[far:], scales[far:] = given["table"].cuda(), given["scales"].cuda()
    here = {"first_row": given["first_row"] - far, "end_row": given["end_row"]}
    rows = torch.where(given["rows"] < given["first_row"], 2**40, given["rows"])
    got = engram_lookup(table, scales, rows.cuda(), **here)
    assert far * 256 > 2**31 and torch.equal(got.cpu(), want)
