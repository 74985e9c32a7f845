# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.kv_cache.compressor_insert import OP, compressor_insert
from vllm.ampere.kernels.kv_cache.window_insert import window_insert
from vllm.ampere.testing.inputs import rope_table

COS_SIN = rope_table(4096)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_closing_tokens_are_stored_as_the_window_writer_stores_them(case):
    """The window writer has an oracle of its own; here the choice of rows and positions is checked, token by token."""
    given = case.inputs(seed=7)
    want, ratio = given["cache"].clone(), given["ratio"]
    closed = 0
    for token, slot in enumerate(given["slots"].tolist()):
        position = int(given["positions"][token])
        if slot >= 0 and position % ratio == ratio - 1:
            first = torch.tensor([position - ratio + 1])
            window_insert(given["latent"][token : token + 1], want, torch.tensor([slot]), first, COS_SIN)
            closed += 1
    compressor_insert(**given)
    assert torch.equal(given["cache"], want)
    assert closed or len(given["slots"]) < 2


def test_two_tokens_of_a_group_may_share_a_slot():
    latent = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    latent[::2] = torch.nan
    cache, want = torch.zeros(2, 2, 32, 584, dtype=torch.uint8)
    compressor_insert(latent, cache, torch.tensor([40, 40, 41, 41]), torch.arange(10, 14), COS_SIN, 2)
    window_insert(latent[1::2], want, torch.tensor([40, 41]), torch.tensor([10, 12]), COS_SIN)
    assert torch.equal(cache, want) and cache.any()


def test_ratio_below_one_is_refused():
    given = OP.cases[-1].inputs()
    with pytest.raises(ContractError, match="ratio is 0, must be at least 1"):
        compressor_insert(**(given | {"ratio": 0}))


def test_more_slots_than_rows_are_refused():
    given = OP.cases[-1].inputs()
    with pytest.raises(ContractError, match="slots has 129 entries, more than the 5 rows of latent"):
        compressor_insert(**(given | {"latent": given["latent"][:5]}))
