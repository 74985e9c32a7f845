# SPDX-License-Identifier: Apache-2.0
"""Rotary tables of an engine: as long as its contexts, whatever other engines of the process have."""

import gc

import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from vllm.ampere.integration.rotary import shortened


class Shared(torch.nn.Module):
    """What upstream shares over layers and engines."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.randn(50, 64), persistent=False)


def test_layers_share_what_their_engine_can_reach():
    shared = Shared()
    whole = shared.cos_sin_cache.clone()
    short = shortened(shared, 7)
    assert torch.equal(short.cos_sin_cache, whole[:7]) and shortened(shared, 7) is short
    # Of its own memory, so that the rest can be freed.
    assert short.cos_sin_cache.untyped_storage().nbytes() == 7 * 64 * 4
    longer = shortened(shared, 30)
    assert torch.equal(longer.cos_sin_cache, whole[:30])
    assert torch.equal(short.cos_sin_cache, whole[:7]) and torch.equal(shared.cos_sin_cache, whole)
    # An engine as long as the model has its own too: another's first call moves the shared table to the host.
    full = shortened(shared, 99)
    assert full is shortened(shared, 50) is not shared and torch.equal(full.cos_sin_cache, whole)
    assert full.cos_sin_cache.data_ptr() != shared.cos_sin_cache.data_ptr()


def test_an_engine_that_is_gone_keeps_no_table():
    shared = Shared()
    kept = torch.utils.weak.WeakIdRef(shortened(shared, 7).cos_sin_cache)
    gc.collect()
    assert kept() is None
    assert len(shortened(shared, 7).cos_sin_cache) == 7
