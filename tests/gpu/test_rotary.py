# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of an engine on a card: the whole one leaves it."""

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_the_whole_table_leaves_the_card():
    pytest.importorskip("vllm.platforms", reason="vLLM is not installed in this Python")
    from tests.integration.test_rotary import Shared

    from vllm.ampere.integration.rotary import shortened

    shared = Shared().cuda()
    whole = shared.cos_sin_cache.cpu()
    short = shortened(shared, 7)
    assert short.cos_sin_cache.is_cuda and not shared.cos_sin_cache.is_cuda
    assert shortened(shared, 9).cos_sin_cache.is_cuda and torch.equal(short.cos_sin_cache.cpu(), whole[:7])
