# SPDX-License-Identifier: Apache-2.0
import tempfile

import numpy
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.kv_cache.gather_dequant import PAGES, SLOTS, gather_dequant, gather_dequant_slots
from vllm.ampere.testing.inputs import kv_pages


def read_row(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """One row in float64: torch's own fp8 type, exponents as numbers, the tail through numpy."""
    page_rows = cache.shape[1]
    page, row = cache[slot // page_rows].reshape(-1), slot % page_rows
    data, scale = page[row * 576 :][:576], page[page_rows * 576 + row * 8 :][:7]
    nope = data[:448].view(torch.float8_e4m3fn).double().view(7, 64) * 2.0 ** (scale.double() - 127).unsqueeze(-1)
    tail = (data[448:].numpy().copy().view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    return torch.cat([nope.flatten(), torch.from_numpy(tail).double()])


@pytest.mark.parametrize("case", SLOTS.cases, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_oracle(case, dtype):
    given = case.inputs(seed=71)
    got = gather_dequant_slots(**given, dtype=dtype)
    want = [read_row(given["cache"], s) if s >= 0 else torch.zeros(512).double() for s in given["slots"].tolist()]
    assert got.dtype == dtype
    assert torch.equal(got.double(), torch.stack(want) if want else got.double())


@pytest.mark.parametrize("case", PAGES.cases, ids=lambda c: c.name)
def test_pages_oracle(case):
    """Rows land at the offset, in order; the rest of the workspace keeps its bytes."""
    given = case.inputs(seed=72)
    given["out"].fill_(torch.nan)
    gather_dequant(**given)
    page_rows = given["cache"].shape[1]
    for request, seq_len in enumerate(given["seq_lens"].tolist()):
        length = seq_len if given["gather_lens"] is None else int(given["gather_lens"][request])
        out = given["out"][request]
        assert out[:2].isnan().all() and out[2 + length :].isnan().all()
        for i in range(length):
            p = seq_len - length + i
            slot = int(given["block_table"][request, p // page_rows]) * page_rows + p % page_rows
            assert torch.equal(out[2 + i].double(), read_row(given["cache"], slot))


def test_result_may_be_strided():
    given = PAGES.cases[-1].inputs(seed=73)
    requests, rows, _ = given["out"].shape
    wide = torch.full((requests, 2 * rows, 1024), torch.nan, dtype=torch.bfloat16)
    gather_dequant(**given)
    gather_dequant(**(given | {"out": wide[:, ::2, 512:]}))
    written = ~wide.isnan()
    assert torch.equal(wide[:, ::2, 512:].nan_to_num(), given["out"])
    assert not written[:, 1::2].any() and not written[..., :512].any()


def test_pages_before_the_gathered_rows_are_not_looked_up():
    """A sliding window frees old pages; their table entries may hold anything."""
    given = PAGES.cases[-1].inputs(seed=74)
    want = given["out"].clone()
    gather_dequant(**(given | {"out": want}))
    given["block_table"][0, : (300 - 131) // 128] = 10**6
    gather_dequant(**given)
    assert torch.equal(given["out"], want)


def test_scale_bytes_zero_and_255_and_both_nan_codes():
    cache = torch.zeros(2, 32, 584, dtype=torch.uint8)
    page = cache[1].view(-1)
    page[:448] = torch.tensor([0x38, 0x00] * 224, dtype=torch.uint8)
    page[64], page[65] = 0x7F, 0xFF
    page[32 * 576 : 32 * 576 + 7] = torch.tensor([0, 127, 255, 1, 254, 127, 127], dtype=torch.uint8)
    row = gather_dequant_slots(cache, torch.tensor([32]))[0]
    assert (row[:64] == 0).all()
    assert row[64:66].isnan().all() and row[66] == 1 and row[67] == 0
    assert (row[128:192:2] == torch.inf).all() and row[129:192:2].isnan().all()
    assert row[192] == 2.0**-126 and row[256] == 2.0**127


def test_pages_past_two_gib():
    """A sparse file stands for the pool: only the pages that are touched take space."""
    stride, pages = 64 << 20, 80
    small = kv_pages(torch.Generator().manual_seed(3), 3, 32)
    with tempfile.NamedTemporaryFile() as file:
        pool = torch.from_file(file.name, shared=True, size=stride * pages, dtype=torch.uint8)
        cache = pool.as_strided((pages, 32, 584), (stride, 584, 1))
        cache[40], cache[79] = small[1], small[2]
        assert 40 * stride > 2**31 and 79 * stride > 2**32
        got = gather_dequant_slots(cache, torch.tensor([40 * 32 + 3, 79 * 32 + 31]))
        out = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
        table = torch.tensor([[40, 79]], dtype=torch.int32)
        gather_dequant(cache, torch.tensor([64], dtype=torch.int32), None, table, out, 0)
    want = gather_dequant_slots(small, torch.arange(32, 96))
    assert torch.equal(got, want[[3, 63]]) and torch.equal(out[0].float(), want)


def test_contract():
    given = PAGES.cases[-1].inputs()
    with pytest.raises(ContractError, match="offset is -1, must be in"):
        gather_dequant(**(given | {"offset": -1}))
    with pytest.raises(ContractError, match="dtype is torch.float16, must be torch.float32 or torch.bfloat16"):
        gather_dequant_slots(given["cache"], torch.tensor([1]), torch.float16)
