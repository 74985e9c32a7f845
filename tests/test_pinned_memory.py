# SPDX-License-Identifier: Apache-2.0
"""Pinned memory with a register function that stands for CUDA's."""

import gc
import mmap

import pytest
import torch

from vllm.ampere import pinned_memory
from vllm.ampere.errors import AmpereError


class Card:
    """Records what was pinned, and answers with an error number."""

    def __init__(self, error=0):
        self.error, self.pinned, self.unpinned = error, [], []

    def allocate(self, size, **more):
        return pinned_memory.allocate(size, register=self.register, unregister=self.unregister, **more)

    def register(self, address, size):
        self.pinned.append((address, size))
        return self.error

    def unregister(self, address):
        self.unpinned.append(address)
        return 0


@pytest.mark.parametrize("size", [1, mmap.PAGESIZE, 264 * 1009, (1 << 22) + 1])
@pytest.mark.parametrize("huge_pages", [False, True])
def test_registers_exactly_the_size_asked_for(size, huge_pages):
    card = Card()
    memory = card.allocate(size, huge_pages=huge_pages)
    assert memory.dtype == torch.uint8 and memory.shape == (size,) and not memory.any()
    assert card.pinned == [(memory.data_ptr(), size)]
    memory[-1] = 7
    assert memory[-1] == 7


def test_every_page_is_there_before_it_is_registered():
    def resident_kib():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

    seen = []
    before = resident_kib()
    memory = pinned_memory.allocate(
        64 << 20, register=lambda *_: seen.append(resident_kib()) or 0, unregister=lambda _: 0
    )
    assert seen[0] - before > 60 << 10 and memory.numel() == 64 << 20


def test_given_back_when_the_last_view_goes():
    card = Card()
    memory = card.allocate(264 * 100)
    address, view = memory.data_ptr(), memory[256 * 100 :].view(100, 8)
    view.fill_(3)
    del memory
    gc.collect()
    assert card.unpinned == [] and (view == 3).all()
    del view
    gc.collect()
    assert card.unpinned == [address]


def test_too_little_memory_is_said_before_any_is_taken():
    card = Card()
    with pytest.raises(AmpereError, match=r"^95\.0 GiB of host memory are to be pinned, 62\.0 GiB are available$") as caught:
        card.allocate(95 << 30, available=lambda: 62 << 30)
    assert "vllm-ampere doctor" in caught.value.hint and card.pinned == []


def test_a_size_that_cannot_be_mapped():
    with pytest.raises(AmpereError, match="of host memory cannot be mapped: "):
        Card().allocate(1 << 60, available=lambda: 1 << 62)


@pytest.mark.parametrize("limit, said", [(64 << 10, "64 KiB"), (pinned_memory.resource.RLIM_INFINITY, "unlimited")])
def test_a_card_that_does_not_pin_names_the_limit(monkeypatch, limit, said):
    monkeypatch.setattr(pinned_memory.resource, "getrlimit", lambda _: (limit, limit))
    card = Card(error=2)
    message = f"CUDA does not pin 0.2 GiB of host memory: error 2, locked memory is limited to {said}"
    with pytest.raises(AmpereError, match=f"^{message}$") as caught:
        card.allocate(200 << 20)
    assert "memlock=-1" in caught.value.hint and card.unpinned == []


def test_available_memory_is_the_kernels():
    total = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    assert 0 < pinned_memory._available_bytes() <= total
