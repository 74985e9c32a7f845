# SPDX-License-Identifier: Apache-2.0
"""The engram table in pinned memory of our own, and its look-up beside the first layer."""

import gc
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from vllm.ampere import pinned_memory
from vllm.ampere.kernels.engram.engram_lookup import engram_lookup
from vllm.ampere.kernels.engram.reference import engram_lookup_ref

ABSENT = importlib.util.find_spec("vllm.platforms") is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ABSENT, reason="vLLM is not installed")]
ROWS = (1 << 20) + 7


@pytest.fixture(scope="module")
def table():
    """264 MiB that end inside a page: codes and scales on the host, and as the card sees them."""
    from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor

    packed = pinned_memory.allocate(ROWS * 264)
    codes, scales = packed[: ROWS * 256].view(ROWS, 256), packed[ROWS * 256 :].view(ROWS, 8)
    codes.random_(0, 127)
    scales.random_(110, 135)
    assert codes.is_pinned() and scales.is_pinned()
    views = [get_accelerator_view_from_cpu_tensor(t) for t in (codes, scales)]
    assert [v.data_ptr() for v in views] == [codes.data_ptr(), scales.data_ptr()]
    return (codes, scales), views


@pytest.mark.parametrize("tokens", [1, 6, 24, 32, 700, 8192])
def test_rows_from_memory_of_our_own(table, tokens):
    host, views = table
    rows = torch.randint(-5, ROWS + 5, (tokens, 24))
    rows[0, 0] = ROWS - 1
    staged = torch.full((tokens + 1, 24, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    engram_lookup(*views, rows.cuda(), 0, ROWS, staged[:tokens])
    assert torch.equal(staged[:tokens].cpu(), engram_lookup_ref(*host, rows, 0, ROWS)) and staged[tokens:].isnan().all()


def test_prefetch_runs_beside_the_first_layer(table, monkeypatch):
    """Upstream's prefetch, on its own stream: done while the stream of the layers is still busy."""
    from vllm.ampere import arch
    from vllm.ampere.integration import engram, gate
    from vllm.models.deepseek_v41.common.engram import Engram

    monkeypatch.setattr(gate, "architecture", lambda: arch.ARCHITECTURES["sm80"])
    host, views = table
    rows, staged = torch.randint(ROWS, (32, 24)), torch.zeros(32, 24, 256, dtype=torch.bfloat16, device="cuda")
    embedding = SimpleNamespace(
        _storage=lambda: (views[0].view(torch.float8_e4m3fn), views[1]), head_start=0, part_n_hash_cols=24,
        vocab_start_idx=0, vocab_end_idx=ROWS,
    )
    embedding.lookup = lambda ids, out, background=False: engram.look_up(embedding, ids, out)
    layer = SimpleNamespace(
        embed_tokens=embedding, _prefetch_stream=torch.cuda.Stream(), _prefetch_done=torch.cuda.Event()
    )
    on_card = rows.cuda()
    Engram._start_prefetch(layer, on_card, staged)
    torch.cuda.synchronize()
    staged.zero_()
    Engram._start_prefetch(layer, on_card, staged)
    layers_done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    layers_done.record()
    layer._prefetch_done.synchronize()
    assert not layers_done.query()
    torch.cuda.synchronize()
    assert torch.equal(staged.cpu(), engram_lookup_ref(*host, rows, 0, ROWS))


def test_memory_is_unpinned_when_it_goes():
    unpinned = []

    def unregister(address):
        unpinned.append(pinned_memory._unregister(address))
        return unpinned[-1]

    memory = pinned_memory.allocate(3 << 20, unregister=unregister)
    assert memory.is_pinned()
    del memory
    gc.collect()
    assert unpinned == [0]
