# SPDX-License-Identifier: Apache-2.0
import math
import tempfile

import numpy
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.kv_cache.gather_dequant import gather_dequant_slots
from vllm.ampere.kernels.kv_cache.window_insert import OP, window_insert
from vllm.ampere.testing.inputs import kv_pages, rope_table

COS_SIN = rope_table(4096)


def record(latent: torch.Tensor, position: int) -> tuple[bytes, torch.Tensor, bytes]:
    """Codes, rotated tail in float64 and scale bytes of one row, in Python arithmetic and torch's own casts."""
    codes, scales = b"", b""
    for group in latent[:448].double().view(7, 64):
        amax = max(float(group.abs().max()), 1e-4)
        exponent = math.ceil(math.log2(amax / 448))
        codes += bytes(
            (group * 2.0**-exponent).clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8).tolist()
        )
        scales += bytes([exponent + 127])
    tail = torch.view_as_complex(latent[448:].double().view(32, 2))
    table = COS_SIN[position].double()
    turned = torch.view_as_real(tail * torch.complex(table[:32], table[32:])).flatten()
    return codes, turned, scales + b"\0"


def bytes_of(cache: torch.Tensor, slot: int) -> tuple[bytes, torch.Tensor, bytes]:
    """The same parts read back through numpy, from the flat bytes of the page."""
    page_rows = cache.shape[1]
    start = cache.storage_offset() + slot // page_rows * cache.stride(0)
    storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    page = storage[start : start + page_rows * 584].numpy()
    row = slot % page_rows
    data, scale = page[row * 576 :][:576], page[page_rows * 576 + row * 8 :][:8]
    tail = (data[448:].copy().view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    return data[:448].tobytes(), torch.from_numpy(tail), scale.tobytes()


def assert_row(cache, slot, latent, position):
    codes, tail, scales = bytes_of(cache, slot)
    want_codes, want_tail, want_scales = record(latent, position)
    assert codes == want_codes and scales == want_scales
    assert ((tail.double() - want_tail).abs() <= want_tail.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle_bytes(case):
    given = case.inputs(seed=5)
    window_insert(**given)
    for token, slot in enumerate(given["slots"].tolist()):
        if slot >= 0:
            assert_row(given["cache"], slot, given["kv"][token], int(given["positions"][token]))


@pytest.mark.parametrize("page_rows", [32, 64, 128])
def test_no_other_byte_changes(page_rows):
    """Neighbouring rows, the page's padding and the other pages of each packed block stay as they were."""
    generator = torch.Generator().manual_seed(0)
    cache = kv_pages(generator, 4, page_rows, page_rows * 584 + 320)
    storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
    before = storage.clone()
    slot = 2 * page_rows + page_rows - 1
    window_insert(
        torch.randn(1, 512, generator=generator).bfloat16(), cache, torch.tensor([slot]), torch.tensor([7]), COS_SIN
    )
    page = 2 * cache.stride(0)
    own = torch.zeros_like(before, dtype=torch.bool)
    own[page + (page_rows - 1) * 576 :][:576] = True
    own[page + page_rows * 576 + (page_rows - 1) * 8 :][:8] = True
    assert torch.equal(storage[~own], before[~own])
    assert not torch.equal(storage[own], before[own])


def test_scale_byte_is_the_smallest_that_fits_for_every_bfloat16():
    """Exact integers: 448 * 2^(byte - 127) is the first to reach the magnitude, over all positive bfloat16."""
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    amax = torch.nn.functional.pad(amax, (0, -len(amax) % 7)).view(-1, 7)
    rows = torch.zeros(len(amax), 512, dtype=torch.bfloat16)
    rows[:, 0:448:64] = amax
    rows[:, 1:448:64] = -amax / 2
    cache = torch.empty(len(amax) // 128 + 1, 128, 584, dtype=torch.uint8)
    slots = torch.arange(len(amax))
    window_insert(rows, cache, slots, torch.zeros_like(slots), COS_SIN)
    byte = cache.flatten(1)[:, 128 * 576 :].reshape(-1, 8)[: len(amax), :7].double()
    magnitude = amax.double().clamp_min(1e-4)
    assert (magnitude <= 448 * 2 ** (byte - 127)).all()
    assert (magnitude > 448 * 2 ** (byte - 128)).all()
    assert byte.min() == 105 and byte.max() == 247


def test_values_that_are_no_numbers_do_not_read_back_as_numbers():
    kv = torch.zeros(3, 512, dtype=torch.bfloat16)
    kv[0, 3], kv[1, 70], kv[2, 448] = torch.nan, torch.inf, torch.nan
    cache = torch.zeros(2, 32, 584, dtype=torch.uint8)
    window_insert(kv, cache, torch.tensor([32, 33, 34]), torch.zeros(3, dtype=torch.int64), COS_SIN)
    rows = gather_dequant_slots(cache, torch.tensor([32, 33, 34]))
    assert not rows[0, :64].isfinite().any() and (rows[0, 64:] == 0).all()
    assert not rows[1, 64:128].isfinite().any() and (rows[1, :64] == 0).all()
    assert rows[2, 448].isnan() and (rows[2, :448] == 0).all()


def test_extra_rows_are_not_read_and_batch_does_not_matter():
    given = OP.cases[-1].inputs(seed=6)
    cache, one_by_one = torch.zeros(2, *given["cache"].shape, dtype=torch.uint8)
    given["kv"] = torch.cat([given["kv"], torch.full((3, 512), torch.nan, dtype=torch.bfloat16)])
    window_insert(**(given | {"cache": cache}))
    for token in range(len(given["slots"])):
        part = slice(token, token + 1)
        window_insert(given["kv"][part], one_by_one, given["slots"][part], given["positions"][part], COS_SIN)
    assert torch.equal(cache, one_by_one) and cache.any()


def test_pages_past_two_gib():
    """A sparse file stands for the pool: only the pages that are touched take space."""
    stride, pages = 64 << 20, 80
    with tempfile.NamedTemporaryFile() as file:
        pool = torch.from_file(file.name, shared=True, size=stride * pages, dtype=torch.uint8)
        cache = pool.as_strided((pages, 32, 584), (stride, 584, 1))
        kv = torch.randn(2, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
        slots = [79 * 32 + 31, 33 * 32]
        window_insert(kv, cache, torch.tensor(slots), torch.tensor([5, 6]), COS_SIN)
        assert 33 * stride > 2**31 and 79 * stride > 2**32
        for token, slot in enumerate(slots):
            assert_row(cache, slot, kv[token], 5 + token)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"slots": lambda x: torch.cat([x, x])}, "slots has 258 entries, more than the 129 rows of kv"),
        ({"positions": lambda x: x[:3]}, "slots has 129 entries, more than the 129 rows of kv or the 3 of positions"),
        ({"cache": lambda x: x[:, :, :583]}, "cache has 583 on axis 584"),
        ({"cache": lambda x: x[:, ::2]}, "each page of cache must be dense"),
        ({"cache": lambda x: x[:1].expand(4, -1, -1)}, "each page of cache must be dense"),
        ({"kv": lambda x: x.float()}, "kv is float32, must be bfloat16"),
    ],
)
def test_contract(change, message):
    given = OP.cases[-1].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        window_insert(**given)
