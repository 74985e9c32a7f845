# SPDX-License-Identifier: Apache-2.0
"""The latent cache's writers and readers on a card: every byte, far pages, and the codec on every number."""

import pytest
import torch

from vllm.ampere.kernels.kv_cache.compressor_insert import compressor_insert
from vllm.ampere.kernels.kv_cache.gather_dequant import gather_dequant, gather_dequant_slots
from vllm.ampere.kernels.kv_cache.window_insert import OP, window_insert
from vllm.ampere.kernels.quantization.e4m3 import e4m3_decode, e4m3_encode
from vllm.ampere.kernels.quantization.reference import e4m3_encode_ref
from vllm.ampere.testing.inputs import kv_pages, rope_table

pytestmark = pytest.mark.gpu
CASE = {case.name: case for case in OP.cases}


def test_codec_on_every_bfloat16_every_code_and_every_midpoint():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes[:127].view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(middle, torch.tensor(end)) for end in (0.0, 1e9)]
    random = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    for x in (every, middle, -middle, *near, random.int().view(torch.float32)):
        assert torch.equal(e4m3_encode(x.cuda()).cpu(), e4m3_encode_ref(x))
    got = e4m3_decode(codes.cuda()).cpu()
    assert torch.equal(got.nan_to_num(1e9), codes.view(torch.float8_e4m3fn).float().nan_to_num(1e9))
    again = e4m3_encode(e4m3_decode(codes.cuda())).cpu()
    is_nan = (codes & 0x7F) == 0x7F  # a card drops the sign of a NaN when it widens one
    assert torch.equal(again[~is_nan], codes[~is_nan]) and ((again[is_nan] & 0x7F) == 0x7F).all()


def test_strided_codes():
    codes = torch.arange(240, dtype=torch.uint8).remainder(127).view(6, 5, 8).transpose(0, 2)[:, 1:]
    want = codes.contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal(e4m3_decode(codes.cuda()).cpu(), want)


@pytest.mark.parametrize("group", ["zeros", "tiny", "exact power", "infinity", "nan"])
def test_scale_byte_of_extreme_groups(group):
    """Codes of a group with an infinity or a NaN are not compared: a NaN's sign is the processor's."""
    given = CASE["one"].inputs(seed=2)
    given["slots"].fill_(40)
    latent = given["kv"]
    latent[0, 64:128] = {"zeros": 0.0, "tiny": 1e-9, "exact power": 448 * 2.0**-6, "infinity": 1.0, "nan": 1.0}[group]
    if group in ("infinity", "nan"):
        latent[0, 70] = float(group.replace("infinity", "inf"))
    on_card = {n: t.clone().cuda() for n, t in given.items()}
    window_insert(**given)
    window_insert(**on_card)
    want, got = given["cache"][1].view(-1), on_card["cache"][1].view(-1).cpu()
    scale = 32 * 576 + (40 - 32) * 8
    assert torch.equal(got[scale : scale + 8], want[scale : scale + 8])
    first = (40 - 32) * 576 + 64
    codes = slice(first, first + 64)
    if group in ("infinity", "nan"):
        assert want[scale + 1] == 255
        assert torch.equal(got[codes] & 0x7F, want[codes] & 0x7F)
        got[codes] = want[codes]
    assert torch.equal(got, want)


def test_no_byte_outside_the_stored_rows_changes():
    """Between the pages, in the null page and in rows that no slot names."""
    given = CASE["padded"].inputs(seed=3, device="cuda")
    cache = given["cache"]
    block = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1))
    before = block.clone()
    window_insert(**given)
    may_change = torch.zeros_like(block, dtype=torch.bool)
    for slot in given["slots"].tolist():
        if slot >= 0:
            page, row = divmod(slot, 32)
            may_change[page, row * 576 : (row + 1) * 576] = True
            may_change[page, 32 * 576 + row * 8 :][:8] = True
    changed = block != before
    assert changed.any() and not (changed & ~may_change).any()


def test_writers_and_readers_past_two_gib():
    stride, pages = 64 << 20, 80
    large = torch.empty(stride * pages, dtype=torch.uint8, device="cuda").as_strided((pages, 32, 584), (stride, 584, 1))
    small = kv_pages(torch.Generator().manual_seed(4), 3, 32, device="cuda")
    latent = torch.randn(4, 512, generator=torch.Generator().manual_seed(5)).bfloat16().cuda()
    positions, table = torch.tensor([3, 5, 7, 9], device="cuda"), rope_table(16, device="cuda")
    near = torch.tensor([33, 40, 64, 95], device="cuda")
    far = near % 32 + torch.where(near < 64, 40, 79) * 32
    window_insert(latent, small, near, positions, table)
    window_insert(latent, large, far, positions, table)
    rows = gather_dequant_slots(small, near)
    assert rows.isfinite().all() and torch.equal(gather_dequant_slots(large, far), rows)
    compressor_insert(latent, small, near, positions, table, 2)
    compressor_insert(latent, large, far, positions, table, 2)
    assert not torch.equal(gather_dequant_slots(small, near), rows)
    assert torch.equal(gather_dequant_slots(large, far), gather_dequant_slots(small, near))
    out = torch.zeros(2, 1, 40, 512, dtype=torch.bfloat16, device="cuda")
    lens = torch.tensor([64], dtype=torch.int32, device="cuda")
    tail = torch.tensor([33], dtype=torch.int32, device="cuda")
    large[40], large[79] = small[1], small[2]
    gather_dequant(small, lens, tail, torch.tensor([[1, 2]], dtype=torch.int32, device="cuda"), out[0], 1)
    gather_dequant(large, lens, tail, torch.tensor([[40, 79]], dtype=torch.int32, device="cuda"), out[1], 1)
    assert torch.equal(out[0], out[1]) and out[0, 0, 1:34].any(-1).all() and not out[0, 0, 34:].any()
