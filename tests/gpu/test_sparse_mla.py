# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on a card: splits, padding, poison, and pools past 2^31 bytes."""

import pytest
import torch

from vllm.ampere.kernels.attention.reference import sparse_mla_decode_ref
from vllm.ampere.kernels.attention.sparse_mla_decode import TOLERANCE, case, sparse_mla_decode
from vllm.ampere.kernels.attention.sparse_mla_prefill import sparse_mla_prefill
from vllm.ampere.kernels.attention.sparse_mla_triton import attend
from vllm.ampere.testing.compare import assert_close

pytestmark = pytest.mark.gpu
OPTIONAL = {"compressed_cache": None, "compressed_slots": None, "compressed_lens": None, "out": None}


def given(tokens=5, heads=8, window=128, selected=512, page_rows=32, compressed_rows=128, seed=5, device="cuda"):
    return OPTIONAL | case(tokens, heads, window, selected, page_rows, compressed_rows).inputs(seed, device)


def reference(inputs):
    return sparse_mla_decode_ref(**{n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in inputs.items()})


def close(got, inputs, label=""):
    assert_close(got.cpu(), reference(inputs), TOLERANCE, label)


def of_tokens(inputs, part):
    per_token = [n for n in inputs if n == "q" or n.endswith(("_slots", "_lens"))]
    return inputs | {n: inputs[n][part] for n in per_token if inputs[n] is not None}


@pytest.mark.parametrize("heads", [1, 8, 16, 24, 32, 64])
@pytest.mark.parametrize("selected", [0, 512])
def test_heads(heads, selected):
    """6 tokens: one request's DSpark step."""
    inputs = given(6, heads, 133, selected)
    close(sparse_mla_decode(**inputs), inputs, "decode")
    close(sparse_mla_prefill(**inputs), inputs, "prefill")


@pytest.mark.parametrize("page_rows", [32, 64, 128])
def test_page_sizes_and_dense_pages(page_rows):
    """Page 0 is NaN, and so are the bytes between the pages, which the dense copy has none of."""
    inputs = given(page_rows=page_rows, compressed_rows=page_rows)
    dense = inputs | {n: inputs[n].contiguous() for n in ("window_cache", "compressed_cache")}
    got = sparse_mla_decode(**inputs)
    assert torch.equal(got, sparse_mla_decode(**dense))
    close(got, inputs)


def test_split_count_changes_the_result_by_rounding_only():
    inputs = given(tokens=7, heads=16)
    for splits in (1, 2, 3, 7, 20, 64):
        close(attend(**inputs, splits=splits), inputs, f"{splits} splits")


@pytest.mark.parametrize("splits", [1, 4])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(splits):
    inputs = given(tokens=67)
    whole = attend(**inputs, splits=splits)
    for part in (slice(0, 1), slice(31, 34), slice(66, 67), slice(5, 66)):
        assert torch.equal(attend(**of_tokens(inputs, part), splits=splits), whole[part])


def test_padding_does_not_change_a_bit():
    """Wider lists whose tail names real rows past the length, under one split count."""
    inputs = given(selected=0)
    want = attend(**inputs, splits=3)
    wide = torch.full((5, 200), 3, dtype=torch.int32, device="cuda")
    wide[:, :128] = inputs["window_slots"]
    assert torch.equal(attend(**(inputs | {"window_slots": wide}), splits=3), want)


def test_lengths_past_the_list_and_below_zero():
    inputs = given(tokens=3)
    inputs["window_lens"][:] = torch.tensor([1000, 128, -5])
    inputs["compressed_lens"][:] = torch.tensor([512, 9999, -1])
    close(sparse_mla_decode(**inputs), inputs)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("sink", [0.0, 30.0, -torch.inf])
def test_no_key_gives_zeros(splits, sink):
    """Padding rows of a captured batch among them: lengths of 0 over stale slots."""
    inputs = given(tokens=3)
    inputs["sink"].fill_(sink)
    inputs["window_lens"][:] = torch.tensor([0, 128, 0])
    inputs["window_slots"][1] = -1
    inputs["compressed_lens"][:] = torch.tensor([0, 64, 0])
    inputs["compressed_slots"][1] = -1
    inputs["out"] = torch.full_like(inputs["q"], torch.nan)
    assert not attend(**inputs, splits=splits).any()


@pytest.mark.parametrize("attend_op", [sparse_mla_decode, sparse_mla_prefill])
def test_bytes_that_no_entry_selects_do_not_matter(attend_op):
    inputs = given(tokens=3, window=20, selected=20)
    inputs["window_lens"].fill_(20)
    inputs["compressed_lens"].fill_(20)
    want = attend_op(**inputs)
    for name in ("window", "compressed"):
        cache = inputs[f"{name}_cache"]
        pages, page_rows, _ = cache.shape
        block = torch.full((pages, cache.stride(0)), 0xFF, dtype=torch.uint8, device="cuda")
        poisoned = block.as_strided(cache.shape, cache.stride())
        for slot in set(inputs[f"{name}_slots"].flatten().tolist()) - {-1}:
            page, row = divmod(slot, page_rows)
            for start, size in ((row * 576, 576), (page_rows * 576 + row * 8, 7)):
                block[page, start : start + size] = cache[page].view(-1)[start : start + size]
        inputs[f"{name}_cache"] = poisoned
    assert torch.equal(attend_op(**inputs), want)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_selected_nan_reaches_its_own_token_only(splits, code):
    inputs = given(tokens=2, window=40, selected=0)
    inputs["window_lens"].fill_(40)
    inputs["window_slots"] = torch.stack([torch.arange(32, 72), torch.arange(72, 112)]).int().cuda()
    inputs["window_cache"] = given(tokens=2, window=128, selected=0)["window_cache"]
    clean = attend(**inputs, splits=splits)
    inputs["window_cache"][1].view(-1)[(42 - 32) * 576] = code
    got = attend(**inputs, splits=splits)
    assert got[0].isnan().all() and torch.equal(got[1], clean[1])


def test_large_logits_do_not_overflow():
    inputs = given()
    inputs["q"] *= 100
    inputs["sink"] *= 1000
    close(sparse_mla_decode(**inputs), inputs)


def test_strided_queries_and_results():
    inputs = given(tokens=9, heads=16)
    wide = torch.full((9, 20, 1024), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 2:18, 512:] = inputs["q"]
    out = torch.full((9, 18, 640), 7.0, dtype=torch.bfloat16, device="cuda")
    view = out[:, 1:17, :512]
    got = sparse_mla_decode(**(inputs | {"q": wide[:, 2:18, 512:], "out": view}))
    assert got.data_ptr() == view.data_ptr()
    assert torch.equal(view, sparse_mla_decode(**inputs))
    out[:, 1:17, :512] = 7.0
    assert (out == 7).all()


@pytest.mark.parametrize("attend_op", [sparse_mla_decode, sparse_mla_prefill])
def test_pages_past_two_and_four_gib(attend_op):
    inputs = given(tokens=2, window=8, selected=0)
    inputs["window_lens"].fill_(8)
    stride, pages = 64 << 20, 80
    small = inputs["window_cache"][:3]
    large = torch.empty(stride * pages, dtype=torch.uint8, device="cuda").as_strided((pages, 32, 584), (stride, 584, 1))
    large[40], large[79] = small[1], small[2]
    near = torch.tensor([[32, 33, 34, 35, 64, 65, 66, 95]] * 2, dtype=torch.int32, device="cuda")
    far = near % 32 + torch.where(near < 64, 40 * 32, 79 * 32).int()
    got = attend_op(**(inputs | {"window_cache": large, "window_slots": far}))
    assert torch.equal(got, attend_op(**(inputs | {"window_cache": small, "window_slots": near})))


def test_many_pages_past_two_gib():
    """As a pool is in service: more pages than 2^31 bytes hold, their distance a packed block."""
    inputs = given(tokens=4, selected=0)
    inputs["window_lens"].fill_(128)
    small, stride = inputs["window_cache"], 32 * 584
    pages = 2**31 // stride + 100
    large = torch.full((pages, stride), 0xFF, dtype=torch.uint8, device="cuda").view(pages, 32, 584)
    large[-len(small) :] = small
    slots = inputs["window_slots"]
    far = torch.where(slots >= 0, slots + (pages - len(small)) * 32, -1).int()
    got = sparse_mla_decode(**(inputs | {"window_cache": large, "window_slots": far}))
    assert torch.equal(got, sparse_mla_decode(**inputs))
