# SPDX-License-Identifier: Apache-2.0
"""Copies of a timed call's inputs."""

import torch

from vllm.ampere.testing.inputs import duplicate, kv_pages


def test_a_copy_has_the_values_and_strides_and_memory_of_its_own():
    cache = kv_pages(torch.Generator().manual_seed(1), 4, 32)
    codes = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    given = {"cache": cache, "lists": (codes[3:40:2], [torch.ones(2)]), "scale": 0.5, "nothing": None}
    copied = duplicate(given)
    assert copied["cache"].stride() == cache.stride() != cache.contiguous().stride()
    pairs = [(copied["cache"], cache), (copied["lists"][0], codes[3:40:2]), (copied["lists"][1][0], torch.ones(2))]
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype and torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert (copied["scale"], copied["nothing"], type(copied["lists"])) == (0.5, None, tuple)
    before = cache.clone()
    copied["cache"].zero_()
    assert torch.equal(cache, before)


def test_what_shares_a_storage_shares_the_copys():
    pool = torch.zeros(10)
    copied = duplicate({"first": pool[:6], "second": pool[4:]})
    copied["first"][4:] = 7
    assert copied["second"].tolist() == [7, 7, 0, 0, 0, 0] and not pool.any()
