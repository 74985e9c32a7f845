# SPDX-License-Identifier: Apache-2.0
"""Both sparse attention ops: they share one contract, so they share these tests."""

import tempfile

import numpy
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.attention import sparse_mla_decode, sparse_mla_prefill
from vllm.ampere.kernels.attention.reference import sparse_mla_decode_ref
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.inputs import kv_pages

ATTEND = {
    "decode": sparse_mla_decode.sparse_mla_decode,
    "prefill": sparse_mla_prefill.sparse_mla_prefill,
}
CASES = [*sparse_mla_decode.OP.cases, *sparse_mla_prefill.OP.cases]
both = pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)


def e4m3(code: int) -> float:
    sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
    if code & 127 == 127:
        return numpy.nan
    return sign * ((8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9)


E4M3 = numpy.array([e4m3(code) for code in range(256)])


def read_row(cache: torch.Tensor, slot: int) -> numpy.ndarray:
    """One latent row in float64, from the flat bytes of its page."""
    page_rows = cache.shape[1]
    page = cache[slot // page_rows].numpy().reshape(-1)
    row = slot % page_rows
    data, scale = page[row * 576 :][:576], page[page_rows * 576 + row * 8 :][:7]
    nope = E4M3[data[:448]].reshape(7, 64) * 2.0 ** (scale.astype(numpy.float64)[:, None] - 127)
    tail = (data[448:].copy().view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    return numpy.concatenate([nope.reshape(-1), tail])


def oracle(given: dict) -> torch.Tensor:
    """Float64, token by token: the sink is one more key, whose value is zero, in an ordinary softmax."""
    q, sink = given["q"].double().numpy(), given["sink"].double().numpy()
    out = numpy.zeros(q.shape)
    for token in range(len(q)):
        keys = []
        for name in ("window", "compressed"):
            if given.get(f"{name}_cache") is not None:
                listed = given[f"{name}_slots"][token].tolist()[: int(given[f"{name}_lens"][token])]
                keys += [read_row(given[f"{name}_cache"], slot) for slot in listed if slot >= 0]
        if keys:
            values = numpy.stack([*keys, numpy.zeros(512)])
            logits = q[token] @ values.T * given["scale"]
            logits[:, -1] = sink
            share = numpy.exp(logits - numpy.logaddexp.reduce(logits, -1, keepdims=True))
            out[token] = share @ values
    return torch.from_numpy(out)


@both
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_oracle(attend, case):
    given = case.inputs(seed=11)
    assert_close(attend(**given), oracle(given), sparse_mla_decode.TOLERANCE, case.name)


@pytest.mark.parametrize("case", CASES[1:4], ids=lambda c: c.name)
def test_reference_in_float64(case):
    given = case.inputs(seed=12)
    got = sparse_mla_decode_ref(**given, dtype=torch.float64)
    assert got.dtype == torch.float64
    assert torch.allclose(got, oracle(given), rtol=1e-11, atol=1e-12)


def _given(tokens=5, window=128, selected=64, seed=13, **sizes):
    return sparse_mla_decode.case(tokens, 8, window, selected, **sizes).inputs(seed=seed)


@both
@pytest.mark.parametrize("page_rows", [32, 64, 128])
def test_page_sizes_and_strided_pages(attend, page_rows):
    given = _given(page_rows=page_rows, compressed_rows=page_rows)
    for name in ("window_cache", "compressed_cache"):
        assert given[name].stride(0) > page_rows * 584
    dense = given | {n: given[n].contiguous() for n in ("window_cache", "compressed_cache")}
    got = attend(**given)
    assert torch.equal(got, attend(**dense))
    assert_close(got, oracle(given), sparse_mla_decode.TOLERANCE)


@both
def test_key_order_does_not_matter(attend):
    given = _given()
    given["window_lens"].fill_(128)
    shuffled = given | {
        "window_slots": given["window_slots"][:, torch.randperm(128, generator=torch.Generator().manual_seed(1))]
    }
    assert_close(attend(**shuffled), attend(**given), sparse_mla_decode.TOLERANCE)


@both
def test_padding_does_not_change_a_bit(attend):
    """Wider lists, holes in them, and slots past the length that name rows of NaN."""
    given = _given()
    want = attend(**given)
    wide = torch.full((5, 200), 3, dtype=torch.int32)
    wide[:, 0:128] = given["window_slots"]
    assert torch.equal(attend(**(given | {"window_slots": wide})), want)
    holes = torch.full((5, 256), -1, dtype=torch.int32)
    holes[:, ::2] = given["window_slots"]
    assert torch.equal(attend(**(given | {"window_slots": holes, "window_lens": given["window_lens"] * 2})), want)


@both
def test_tokens_do_not_depend_on_their_batch(attend):
    given = _given(tokens=67)
    whole = attend(**given)
    per_token = [n for n in given if n == "q" or n.endswith(("_slots", "_lens"))]
    for part in (slice(0, 1), slice(31, 34), slice(66, 67), slice(5, 66)):
        alone = attend(**(given | {n: given[n][part] for n in per_token}))
        assert torch.equal(alone, whole[part])


@both
def test_a_slot_listed_twice_counts_twice(attend):
    given = _given(tokens=2, window=6, selected=0)
    given["window_lens"].fill_(6)
    given["window_slots"] = torch.tensor([[40, 40, 41, 40, -1, 50], [33, 60, 60, -1, -1, -1]], dtype=torch.int32)
    got = attend(**given)
    assert_close(got, oracle(given), sparse_mla_decode.TOLERANCE)
    once = attend(
        **(
            given
            | {"window_slots": torch.tensor([[40, 41, 50, -1, -1, -1], [33, 60, -1, -1, -1, -1]], dtype=torch.int32)}
        )
    )
    assert not torch.equal(got, once)


@both
def test_the_two_lists_are_one_set_of_keys(attend):
    """A key gives the same wherever it is listed: all in the window list, or some as compressed rows of that cache."""
    given = _given(selected=0)
    given["window_lens"].fill_(128)
    slots, lens = given["window_slots"], torch.full((5,), 64, dtype=torch.int32)
    halves = given | {
        "window_slots": slots[:, :64], "window_lens": lens,
        "compressed_cache": given["window_cache"], "compressed_slots": slots[:, 64:], "compressed_lens": lens,
    }  # fmt: skip
    assert torch.equal(attend(**halves), attend(**given))


@both
@pytest.mark.parametrize("sink", [0.0, 30.0, -torch.inf])
def test_no_key_gives_zeros(attend, sink):
    """Empty lists, lists of -1, and a length of zero over real slots."""
    given = _given(tokens=3)
    given["sink"].fill_(sink)
    given["window_lens"][:] = torch.tensor([0, 128, 0])
    given["window_slots"][1] = -1
    given["compressed_lens"][:] = torch.tensor([0, 64, 0])
    given["compressed_slots"][1] = -1
    out = attend(**given)
    assert torch.equal(out, torch.zeros_like(out))


@both
def test_sink_enters_the_denominator_only(attend):
    given = _given(tokens=1, window=1, selected=0)
    given["window_slots"].fill_(37)
    given["window_lens"].fill_(1)
    row = torch.from_numpy(read_row(given["window_cache"], 37))
    given["sink"].fill_(-torch.inf)
    assert_close(attend(**given), row.expand(1, 8, -1), sparse_mla_decode.TOLERANCE)
    given["q"].zero_()
    given["sink"].fill_(torch.log(torch.tensor(3.0)))
    assert_close(attend(**given), row.expand(1, 8, -1) / 4, sparse_mla_decode.TOLERANCE)


@both
def test_large_logits_do_not_overflow(attend):
    given = _given()
    given["q"] *= 100
    given["sink"] *= 1000
    got = attend(**given)
    assert got.isfinite().all()
    assert_close(got, oracle(given), sparse_mla_decode.TOLERANCE)


@both
def test_bytes_that_no_entry_selects_do_not_matter(attend):
    """Everything but the selected rows becomes NaN: page 0, other rows, other pages, the bytes between pages."""
    given = _given(tokens=3, window=20, selected=20)
    given["window_lens"].fill_(20)
    given["compressed_lens"].fill_(20)
    want = attend(**given)
    for name in ("window", "compressed"):
        cache = given[f"{name}_cache"]
        poisoned = torch.full_like(torch.empty(cache.shape[0], cache.stride(0), dtype=torch.uint8), 0xFF)
        poisoned = poisoned.as_strided(cache.shape, cache.stride())
        page_rows = cache.shape[1]
        for slot in set(given[f"{name}_slots"].flatten().tolist()) - {-1}:
            page, row = divmod(slot, page_rows)
            for start, size in ((row * 576, 576), (page_rows * 576 + row * 8, 7)):
                poisoned[page].view(-1)[start : start + size] = cache[page].view(-1)[start : start + size]
        given[f"{name}_cache"] = poisoned
    assert torch.equal(attend(**given), want)


@both
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_selected_nan_reaches_its_own_token_only(attend, code):
    given = _given(tokens=2, window=4, selected=0)
    given["window_lens"].fill_(4)
    given["window_slots"] = torch.tensor([[40, 41, 42, 43], [50, 51, 52, 53]], dtype=torch.int32)
    clean = attend(**given)
    given["window_cache"][1].view(-1)[(42 - 32) * 576] = code
    got = attend(**given)
    assert got[0].isnan().all() and torch.equal(got[1], clean[1])


@both
def test_scale_byte_zero_reads_as_zero(attend):
    given = _given(tokens=1, window=1, selected=0)
    given["window_slots"].fill_(37)
    given["window_lens"].fill_(1)
    given["window_cache"][1].view(-1)[32 * 576 + 5 * 8] = 0
    got = attend(**given)
    assert (got[0, :, :64] == 0).all() and (got[0, :, 64:] != 0).any()


@both
def test_pages_past_two_gib(attend):
    """A sparse file stands for the pool: only the pages that are touched take space."""
    stride, pages = 64 << 20, 80
    given = _given(tokens=2, window=8, selected=0)
    given["window_lens"].fill_(8)
    small = kv_pages(torch.Generator().manual_seed(2), 3, 32)
    with tempfile.NamedTemporaryFile() as file:
        pool = torch.from_file(file.name, shared=True, size=stride * pages, dtype=torch.uint8)
        large = pool.as_strided((pages, 32, 584), (stride, 584, 1))
        large[40], large[79] = small[1], small[2]
        assert 40 * stride > 2**31 and 79 * stride > 2**32
        near = torch.tensor([[32, 33, 34, 35, 64, 65, 66, 95]] * 2, dtype=torch.int32)
        far = near % 32 + torch.where(near < 64, 40 * 32, 79 * 32).int()
        got = attend(**(given | {"window_cache": large, "window_slots": far}))
    assert torch.equal(got, attend(**(given | {"window_cache": small, "window_slots": near})))


@both
def test_one_compressed_argument_without_the_others_is_refused(attend):
    given = _given()
    del given["compressed_lens"]
    with pytest.raises(ContractError, match="compressed_lens is missing, the other compressed arguments are given"):
        attend(**given)
