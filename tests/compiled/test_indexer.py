# SPDX-License-Identifier: Apache-2.0
"""The indexer's Triton kernels beside their references; `tests/gpu/test_indexer.py` runs the same on a card."""

import pytest
import torch

from vllm.ampere.kernels.indexer import (
    candidate_mqa_logits,
    candidate_topk_triton,
    key_norm_rope_store,
    mqa_logits,
    paged_mqa_logits,
    query_rope_quant,
)
from vllm.ampere.kernels.indexer.candidate_topk import CANDIDATE_BLOCKS, MASK_TO_CANDIDATES, SELECT_TOPK
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.inputs import ascending_lists
from vllm.ampere.testing.parity import assert_same_bits

INF, NAN = float("inf"), float("nan")


def triton_of(op):
    return next(i.function for i in op.implementations if i.name == "triton")


def moved(given, device):
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}


def sized(op, seed, **sizes):
    case = op.cases[2]
    return type(case)("x", case.sizes | sizes, case.make).inputs(seed)


def both(op, given, device):
    """(what Triton computes on the device, brought back; what the reference computes)."""
    got = triton_of(op)(**moved(given, device))
    return got.cpu(), op.reference(**given)


def pages_apart(cache, gap, offset, fill):
    """The pages of `cache`, at any byte of a pool of `fill`."""
    size = cache[0].numel()
    pool = torch.full((offset + len(cache) * (size + gap),), fill, dtype=torch.uint8, device=cache.device)
    apart = pool.as_strided(cache.shape, (size + gap, cache.shape[2], 1), offset)
    apart.copy_(cache)
    return pool, apart


# ---- scores


@pytest.mark.parametrize("page", [32, 128])
def test_paged_scores_of_pages_at_odd_bytes(device, page):
    op = paged_mqa_logits.OP
    given = sized(op, 1, T=4, N=8, R=2, P=page, S=150)
    given["visible"] = torch.tensor([0, 1, page + 1, 150], dtype=torch.int32)
    want = op.reference(**given)
    there = moved(given, device)
    _, there["cache"] = pages_apart(there["cache"], 61, 51, 0xFF)
    assert_close(triton_of(op)(**there).cpu(), want, op.tolerances["logits"])


def test_nan_in_unseen_keys_and_unread_table_entries(device):
    """Six draft rows of one request, each with one key more than the row before, amid NaN."""
    op = paged_mqa_logits.OP
    given = sized(op, 2, T=6, N=32, R=1, P=32, S=80)
    given["visible"] = torch.arange(60, 66, dtype=torch.int32)
    want = op.reference(**given)
    given["block_table"][0, 3:] = -1
    codes = given["cache"].view(len(given["cache"]), -1)[int(given["block_table"][0, 2])]
    codes[2 * 128 : 32 * 128] = 0xFF
    assert_close(triton_of(op)(**moved(given, device))[:5].cpu(), want[:5, :], op.tolerances["logits"])


def test_nan_key_and_nan_query_stay_where_they_are(device):
    op = paged_mqa_logits.OP
    given = sized(op, 3, T=3, N=8, R=1, P=32, S=70)
    given["visible"][:] = 70
    given["q"].view(torch.uint8)[1, 3, 17] = 0x7F
    given["cache"].view(len(given["cache"]), -1)[int(given["block_table"][0, 1]), 5 * 128 + 9] = 0xFF
    got, want = both(op, given, device)
    assert got[1, :70].isnan().all() and got[[0, 2]].isnan().nonzero()[:, 1].tolist() == [37, 37]
    assert_close(got, want, op.tolerances["logits"])


def test_padded_rows_read_no_table_row(device):
    op = paged_mqa_logits.OP
    given = sized(op, 4, T=3, N=8, R=1, P=32, S=40)
    given["visible"] = torch.tensor([0, -1, -(2**31)], dtype=torch.int32)
    given["request"] = torch.tensor([2**31 - 1, -1, 999], dtype=torch.int32)
    assert (triton_of(op)(**moved(given, device)) == -INF).all()


def test_a_token_scores_alike_alone_and_for_any_width_and_page(device):
    op = paged_mqa_logits.OP
    given = moved(sized(op, 5, T=5, N=8, R=2, P=64, S=130), device)
    whole = triton_of(op)(**given)
    rows = ("q", "weights", "request", "visible")
    alone = triton_of(op)(**given | {n: given[n][3:4] for n in rows} | {"width": 300})
    assert torch.equal(alone[0, :135], whole[3]) and (alone[0, 135:] == -INF).all()
    cache = given["cache"].view(len(given["cache"]), -1)
    codes, scales = cache[:, : 64 * 128].reshape(-1, 32 * 128), cache[:, 64 * 128 :].reshape(-1, 32 * 4)
    halves = torch.cat([codes, scales], 1).view(-1, 32, 132)
    table = torch.stack([2 * given["block_table"], 2 * given["block_table"] + 1], -1).flatten(1)
    assert torch.equal(triton_of(op)(**given | {"cache": halves, "block_table": table}), whole)


def test_gathered_scores_keep_nan_and_unseen_keys_apart(device):
    op = mqa_logits.OP
    given = sized(op, 6, M=4, N=8, S=90)
    given["starts"] = torch.tensor([0, 10, 90, 5], dtype=torch.int32)
    given["ends"] = torch.tensor([0, 80, 90, 3], dtype=torch.int32)
    given["keys"].view(torch.uint8)[:10] = 0xFF
    given["keys"].view(torch.uint8)[80:] = 0x7F
    given["keys"].view(torch.uint8)[33, 77] = 0x7F
    got, want = both(op, given, device)
    assert got[1].isnan().nonzero().flatten().tolist() == [23] and (got[[0, 2, 3]] == -INF).all()
    assert_close(got, want, op.tolerances["logits"])


def test_six_tokens_of_several_requests_amid_nan(device):
    """Draft rows in order, requests in turn, padded rows; keys and table entries that no row sees are poison."""
    op = paged_mqa_logits.OP
    given = sized(op, 7, T=16, N=8, R=3, P=32, S=300)
    given["request"] = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 1, 2, 0, 9, -7, 1, 2**31 - 1], dtype=torch.int32)
    given["visible"] = torch.tensor([1, 2, 3, 4, 158, 159, 160, 161, 31, 0, 32, 70, 0, -1, 161, 0], dtype=torch.int32)
    want = op.reference(**given)
    cache = given["cache"].flatten(1)
    for r, seen in ((0, 70), (1, 161), (2, 32)):
        page, row = given["block_table"][r, seen // 32], seen % 32
        cache[page, row * 128 : 32 * 128] = 0xFF
        cache[page, 32 * 128 + row * 4 :] = 0xFF
        given["block_table"][r, -(-seen // 32) :] = -(2**31)
    there = moved(given, device)
    got = triton_of(op)(**there)
    assert_close(got.cpu(), want, op.tolerances["logits"])
    _, there["cache"] = pages_apart(there["cache"], 61, 51, 0xFF)
    assert torch.equal(triton_of(op)(**there), got)
    for t in (3, 4, 10, 11, 14):
        rows = {n: there[n][t : t + 1] for n in ("q", "weights", "request", "visible")}
        assert torch.equal(triton_of(op)(**there | rows)[0], got[t])


def test_a_padded_row_beside_a_nan_key_and_a_nan_query(device):
    op = paged_mqa_logits.OP
    given = sized(op, 8, T=6, N=8, R=1, P=32, S=140)
    given["visible"] = torch.tensor([140, 129, 128, 0, 127, 1], dtype=torch.int32)
    given["q"].view(torch.uint8)[1, 3, 17] = 0x7F
    given["cache"].flatten(1)[int(given["block_table"][0, 4]), 9] = 0xFF
    got, want = both(op, given, device)
    assert got.isnan().sum(1).tolist() == [1, 129, 0, 0, 0, 0] and got[0, 128].isnan()
    assert_close(got, want, op.tolerances["logits"])


def test_gathered_tokens_of_two_requests_in_one_program(device):
    """The keys before, between and behind those that a token sees are NaN, so a token's bits are also those alone."""
    op = mqa_logits.OP
    given = sized(op, 9, M=14, N=8, S=600)
    given["starts"] = torch.tensor([20] * 4 + [300] * 7 + [20, 600, 5], dtype=torch.int32)
    given["ends"] = torch.tensor([21, 22, 150, 151, 300, 301, 428, 429, 540, 3, 302, 152, 600, 5], dtype=torch.int32)
    want = op.reference(**given)
    for unseen in (slice(20), slice(152, 300), slice(540, 600)):
        given["keys"].view(torch.uint8)[unseen] = 0xFF
        given["key_scales"][unseen] = NAN
    there = moved(given, device)
    got = triton_of(op)(**there)
    assert_close(got.cpu(), want, op.tolerances["logits"])
    for t in (3, 6, 8, 11):
        rows = {n: there[n][t : t + 1] for n in ("q", "weights", "starts", "ends")}
        assert torch.equal(triton_of(op)(**there | rows)[0], got[t])


def test_gathered_codes_at_odd_bytes(device):
    op = mqa_logits.OP
    there = moved(sized(op, 10, M=7, N=8, S=200), device)
    pool = torch.full((3 + 200 * 131,), 0xFF, dtype=torch.uint8, device=device)
    keys = pool.as_strided((200, 128), (131, 1), 3)
    keys.copy_(there["keys"].view(torch.uint8))
    assert torch.equal(triton_of(op)(**there | {"keys": keys.view(torch.float8_e4m3fn)}), triton_of(op)(**there))


# ---- scores of listed blocks


@pytest.mark.parametrize("page, size", [(32, 8), (48, 5)])
def test_listed_scores_of_pages_at_odd_bytes_amid_nan(device, page, size):
    """What is not listed is NaN in its page, and a page without a listed key is not looked up."""
    op = candidate_mqa_logits.OP
    given = sized(op, 31, T=3, N=8, R=1, P=page, S=300, L=3, block_size=size)
    given["visible"] = torch.tensor([300, 299, 3], dtype=torch.int32)
    given["candidates"] = torch.tensor([[1, 7, 37], [6, -1, -1], [3, 4, -1]], dtype=torch.int32)
    want = op.reference(**given)
    assert want.isfinite().sum(1).tolist() == [min(3 * size, 2 * size + 300 - 37 * size), size, 0]
    listed = [block * size + member for block in (1, 6, 7, 37) for member in range(size) if block * size + member < 300]
    codes = torch.full((len(given["cache"]), page * 132), 0xFF, dtype=torch.uint8)
    for j in listed:
        at, row = int(given["block_table"][0, j // page]), j % page
        for part in (slice(row * 128, row * 128 + 128), slice(page * 128 + row * 4, page * 128 + row * 4 + 4)):
            codes[at, part] = given["cache"].flatten(1)[at, part]
    unread = sorted(set(range(given["block_table"].shape[1])) - {j // page for j in listed})
    assert unread
    given["block_table"][0, unread] = -(2**31)
    there = moved(given | {"cache": codes.view(given["cache"].shape)}, device)
    _, there["cache"] = pages_apart(there["cache"], 61, 51, 0xFF)
    assert_close(triton_of(op)(**there).cpu(), want, op.tolerances["logits"])


def test_listed_rows_of_several_requests_are_selected_as_from_masked_scores(device):
    """Bit by bit, with a NaN key and with tokens whose scores all tie."""
    op = candidate_mqa_logits.OP
    given = moved(sized(op, 32, T=5, N=8, R=2, P=32, S=300, L=12), device)
    given["weights"][3] = 0.0
    given["cache"].flatten(1)[:, 5 * 128 + 3] = 0xFF
    rest = {n: given[n] for n in ("q", "weights", "cache", "block_table", "request", "visible")}
    scores = triton_of(paged_mqa_logits.OP)(**rest, width=300)
    given["candidates"] = triton_of(CANDIDATE_BLOCKS)(scores, given["visible"], 12, 8)
    inside = triton_of(op)(**given)
    whole = torch.nn.functional.pad(scores, (0, 8), value=-INF)
    row = (given["candidates"].long()[:, :, None] * 8 + torch.arange(8, device=device)).flatten(1)
    picked = whole.gather(1, row.clamp(0, 307)).masked_fill(row < 0, -INF)
    assert_same_bits({"scores": inside}, {"scores": picked})
    for k in (5, 64):
        want = triton_of(SELECT_TOPK)(triton_of(MASK_TO_CANDIDATES)(scores, given["candidates"], 8), k)
        assert torch.equal(triton_of(SELECT_TOPK)(inside, k, given["visible"], given["candidates"], 8), want)


def test_padded_rows_list_nothing(device):
    op = candidate_mqa_logits.OP
    given = sized(op, 33, T=3, N=8, R=1, P=32, S=40, L=3)
    given["visible"] = torch.tensor([0, -1, -(2**31)], dtype=torch.int32)
    given["request"] = torch.tensor([2**31 - 1, -1, 999], dtype=torch.int32)
    assert (triton_of(op)(**moved(given, device)) == -INF).all()


def test_blocks_past_what_a_token_sees_are_not_read(device):
    op = candidate_mqa_logits.OP
    given = sized(op, 34, T=3, N=8, R=1, P=32, S=100, L=4)
    given["candidates"][:] = torch.tensor([0, 2, 12, 2**31 - 1], dtype=torch.int32)
    given["visible"] = torch.tensor([3, 18, 100], dtype=torch.int32)
    got, want = both(op, given, device)
    assert_close(got, want, op.tolerances["logits"])
    assert (got > -INF).sum(1).tolist() == [3, 10, 20]


# ---- keys and queries


@pytest.mark.parametrize("ratio", [1, 2])
def test_keys_at_odd_bytes_leave_all_others(device, ratio):
    op = key_norm_rope_store.OP
    given = sized(op, 7, T=9, P=8, ratio=ratio, M=64)
    given["positions"] = torch.arange(20, 33)
    given["k"][given["slots"] < 0] = NAN
    pool, cache = pages_apart(given["cache"], 77, 33, 0xA5)
    other, there = pages_apart(given["cache"].to(device), 77, 33, 0xA5)
    op.reference(**given | {"cache": cache})
    triton_of(op)(**moved(given, device) | {"cache": there})
    assert (pool != 0xA5).any() and torch.equal(other.cpu(), pool)


def test_nan_and_infinite_keys_are_stored_as_the_reference_stores_them(device):
    op = key_norm_rope_store.OP
    given = sized(op, 8, T=4, P=8, ratio=1, M=64)
    given["slots"] = torch.arange(4)
    given["k"][0, 3], given["k"][1, 100], given["k"][2, 127] = NAN, INF, -INF
    given["k"][3] = 0
    there = moved(given, device)
    triton_of(op)(**there)
    op.reference(**given)
    got, want = there["cache"].cpu().view(-1), given["cache"].view(-1)
    nan = want[: 8 * 128] & 0x7F == 0x7F
    assert nan.any() and torch.equal(got[: 8 * 128] & 0x7F == 0x7F, nan)
    assert torch.equal(got[: 8 * 128][~nan], want[: 8 * 128][~nan]) and torch.equal(got[8 * 128 :], want[8 * 128 :])


def test_queries_of_a_wider_projection_with_nan_and_infinity(device):
    op = query_rope_quant.OP
    given = sized(op, 9, T=3, N=8, M=64)
    given["q"][0, 1, 5], given["q"][1, 2, 70], given["q"][2, 3, 127] = NAN, INF, -INF
    wide = torch.full((3, 10, 160), NAN, dtype=torch.bfloat16)
    wide[:, 1:9, 16:144] = given["q"]
    there = moved(given, device)
    there["q"] = wide.to(device)[:, 1:9, 16:144]
    codes, weights = triton_of(op)(**there)
    want_codes, want_weights = op.reference(**given)
    got, want = codes.cpu().view(torch.uint8), want_codes.view(torch.uint8)
    nan = want & 0x7F == 0x7F
    assert nan.any() and torch.equal(got & 0x7F == 0x7F, nan) and torch.equal(got[~nan], want[~nan])
    assert_close(weights.cpu(), want_weights, op.tolerances["weights"])


# ---- selection

ROWS = {
    "ties": lambda g: torch.randint(-3, 4, (700,), generator=g).float(),
    "equal": lambda g: torch.full((700,), -1.5),
    "zeros": lambda g: torch.where(torch.rand(700, generator=g) < 0.5, 0.0, -0.0),
    "nothing": lambda g: torch.full((700,), -INF),
    "nan": lambda g: torch.full((700,), NAN),
    "mixed": lambda g: torch.tensor([NAN, -INF, INF, 1e-45, -1e-45, 3.4e38, -3.4e38, 0.0, -NAN])[
        torch.randint(0, 9, (700,), generator=g)
    ],
    "negative": lambda g: -torch.rand(700, generator=g) * torch.exp2(torch.randint(-140, 120, (700,), generator=g)),
    "few": lambda g: torch.where(torch.arange(700) % 97 == 0, torch.randn(700, generator=g), -INF),
}


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(11)
    return torch.stack([make(generator) for make in ROWS.values()])


@pytest.mark.parametrize("k", [1, 37, 512, 900])
def test_topk_of_ties_nan_and_infinities(device, rows, k):
    got, want = both(SELECT_TOPK, {"scores": rows, "k": k}, device)
    assert torch.equal(got, want)
    assert ((got >= -1) & (got < 700)).all()


def test_topk_in_several_rounds(device):
    """More columns than one program holds; the best lie in one chunk, and ties cross chunks."""
    generator = torch.Generator().manual_seed(12)
    scores = torch.randint(0, 200, (2, 8192 * 2 + 77), generator=generator).float()
    scores[0, 9000:9700] += 1000
    scores[1] = 5.0
    wide = torch.full((2, scores.shape[1] + 13), NAN)
    wide[:, 5:-8] = scores
    want = SELECT_TOPK.reference(scores, 600)
    assert torch.equal(triton_of(SELECT_TOPK)(wide.to(device)[:, 5:-8], 600).cpu(), want)


@pytest.mark.parametrize("programs", [1, 1024])
def test_topk_of_rows_that_see_a_part(device, monkeypatch, programs):
    """Nothing, one column, to a chunk's end, past it and all of three chunks; what is not seen is infinite."""
    monkeypatch.setattr(candidate_topk_triton, "_PROGRAMS", programs)
    generator = torch.Generator().manual_seed(14)
    width = 8192 * 2 + 77
    visible = torch.tensor([0, -5, 1, 40, 8192, 8193, 16_000, width], dtype=torch.int32)
    scores = torch.randint(0, 300, (len(visible), width), generator=generator).float()
    want = SELECT_TOPK.reference(scores, 50, visible)
    scores[torch.arange(width) >= visible[:, None]] = INF
    assert torch.equal(triton_of(SELECT_TOPK)(scores.to(device), 50, visible.to(device)).cpu(), want)
    assert [int((row >= 0).sum()) for row in want] == [0, 0, 1, 40, 50, 50, 50, 50]
    blocks = CANDIDATE_BLOCKS.reference(scores, visible, 30, 8)
    assert torch.equal(triton_of(CANDIDATE_BLOCKS)(scores.to(device), visible.to(device), 30, 8).cpu(), blocks)


def test_scores_without_fill_have_the_same_bits_where_they_are_seen(device):
    op = paged_mqa_logits.OP
    given = moved(sized(op, 15, T=5, N=8, R=2, P=32, S=150), device)
    whole = triton_of(op)(**given)
    part = triton_of(op)(**given | {"fill": False})
    seen = torch.arange(whole.shape[1], device=device) < given["visible"][:, None]
    assert seen.any() and not seen.all()
    assert torch.equal(part[seen], whole[seen]) and (whole[~seen] == -INF).all()


@pytest.mark.parametrize("blocks", [60, 1100])
def test_topk_of_listed_blocks(device, blocks):
    """In one round and in two; ties cross blocks, and the lower row wins."""
    generator = torch.Generator().manual_seed(13)
    listed = ascending_lists(generator, torch.tensor([blocks, blocks // 2]), 5000, blocks)
    scores = torch.randint(0, 40, (2, blocks * 8), generator=generator).float()
    scores[listed.repeat_interleave(8, 1) < 0] = -INF
    scores[0, 17] = NAN
    want = SELECT_TOPK.reference(scores, 300, None, listed, 8)
    got = triton_of(SELECT_TOPK)(scores.to(device), 300, None, listed.to(device), 8).cpu()
    assert torch.equal(got, want) and got.max() > blocks * 8


@pytest.mark.parametrize("blocks, size", [(1, 8), (30, 8), (300, 3)])
def test_candidate_blocks_of_ties_nan_and_infinities(device, rows, blocks, size):
    visible = torch.tensor([700, 0, -3, 699, 8, 1, 641, 9], dtype=torch.int32)
    given = {"scores": rows, "visible": visible, "blocks": blocks, "block_size": size}
    got, want = both(CANDIDATE_BLOCKS, given, device)
    assert torch.equal(got, want)


def test_mask_takes_blocks_in_any_order_and_ignores_wrong_ones(device, rows):
    candidates = torch.tensor([[87, -1, 0, 87, 88, -(2**31), 2**31 - 1]], dtype=torch.int32).repeat(len(rows), 1)
    given = {"scores": rows, "candidates": candidates, "block_size": 8}
    got, want = both(MASK_TO_CANDIDATES, given, device)
    assert_same_bits({"scores": got}, {"scores": want})
    assert torch.isfinite(got[1]).sum() == 12
