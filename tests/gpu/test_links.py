# SPDX-License-Identifier: Apache-2.0
"""The links between the cards at hand, measured as `vllm-ampere plan --probe` does."""

import pytest
import torch

from vllm.ampere.planner import probe
from vllm.ampere.planner.inventory import Inventory, LinkKind

pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")]


def test_links_of_these_cards():
    count = torch.cuda.device_count()
    measured = probe.measure(Inventory(cards=count, card_gib=80, link="nvlink"))
    assert list(measured.links) == [LinkKind.NVLINK]
    for what in ("all-reduce", "message"):
        times = [each.us for each in measured.samples if each.what == what]
        assert len(times) == len(probe.SIZES) and 0 < times[0] < times[1] < times[2]
    (copy,) = (each for each in measured.samples if each.what == "from host")
    # A card's PCIe link carries 32 GB/s in its fourth generation, 64 in its fifth, 128 in its sixth.
    assert copy.cards == count and 0 < copy.gb_s < 128
