# SPDX-License-Identifier: Apache-2.0
"""The indexer's kernels on the card: what is checked of compiled kernels on the CPU too, and the sizes it cannot."""

import pytest
import torch

from tests.compiled.test_indexer import *  # noqa: F403
from tests.compiled.test_indexer import both, moved, sized, triton_of
from vllm.ampere.kernels.indexer import candidate_mqa_logits, key_norm_rope_store, mqa_logits, paged_mqa_logits
from vllm.ampere.kernels.indexer.candidate_topk import CANDIDATE_BLOCKS, MASK_TO_CANDIDATES, SELECT_TOPK
from vllm.ampere.testing.compare import assert_close

pytestmark = pytest.mark.gpu
BLOCK, FAR = 1 << 26, 40


def far_pages(page_rows):
    """Pages 2^26 bytes apart in a pool of more than 2^31 bytes of NaN codes."""
    pool = torch.full(((FAR + 1) * BLOCK,), 0xFF, dtype=torch.uint8, device="cuda")
    return pool, pool.as_strided((FAR + 1, page_rows, 132), (BLOCK, 132, 1))


def test_scores_of_pages_past_2_to_the_31_bytes():
    op = paged_mqa_logits.OP
    given = sized(op, 21, T=6, N=32, R=1, P=64, S=900)
    want = triton_of(op)(**moved(given, "cuda"))
    _, cache = far_pages(64)
    table = torch.arange(FAR, FAR - given["block_table"].shape[1], -1, dtype=torch.int32)[None]
    cache[table[0].long().cuda()] = given["cache"][given["block_table"][0].long()].cuda()
    got = triton_of(op)(**moved(given | {"block_table": table}, "cuda") | {"cache": cache})
    assert torch.equal(got, want)
    assert_close(got.cpu(), op.reference(**given), op.tolerances["logits"])


def test_keys_in_pages_past_2_to_the_31_bytes():
    op = key_norm_rope_store.OP
    given = sized(op, 22, T=64, P=64, ratio=1, M=4096)
    given["slots"] = torch.arange(64)
    near = moved(given, "cuda")
    triton_of(op)(**near)
    pool, cache = far_pages(64)
    triton_of(op)(**moved(given | {"slots": given["slots"] + FAR * 64}, "cuda") | {"cache": cache})
    assert torch.equal(cache[FAR], near["cache"][0])
    pool[FAR * BLOCK : FAR * BLOCK + 64 * 132] = 0xFF
    assert (pool == 0xFF).all()


@pytest.mark.parametrize("tokens, width", [(1, 500_009), (6, 131_072), (300, 20_000)])
def test_selection_of_long_rows(tokens, width):
    """Rounded scores tie by the thousand."""
    generator = torch.Generator().manual_seed(width)
    scores = (torch.randn(tokens, width, generator=generator) * 300).round()
    scores[torch.rand(scores.shape, generator=generator) < 0.01] = torch.nan
    visible = torch.randint(0, width + 1, (tokens,), generator=generator, dtype=torch.int32)
    got, want = both(SELECT_TOPK, {"scores": scores, "k": 512}, "cuda")
    assert torch.equal(got, want)
    given = {"scores": scores, "visible": visible, "blocks": 2048, "block_size": 8}
    candidates, want = both(CANDIDATE_BLOCKS, given, "cuda")
    assert torch.equal(candidates, want)
    given = {"scores": scores, "candidates": candidates, "block_size": 8}
    got, want = both(MASK_TO_CANDIDATES, given, "cuda")
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_scores_past_2_to_the_31_elements():
    """The last of 4,300 rows of half a million columns."""
    wide = torch.full((4300, 500_000), -torch.inf, device="cuda")
    assert wide[:-1].numel() > 2**31
    wide[-1, 7::1000] = torch.arange(500.0, device="cuda")
    got = triton_of(SELECT_TOPK)(wide, 512)
    assert got[-1, :500].tolist() == list(range(7, 500_000, 1000))
    assert (got[-1, 500:] == -1).all() and (got[:-1] == -1).all()


def draft_blocks(seed: int, width: int) -> dict:
    """Inputs of `paged_mqa_logits`: six rows of each of three requests, which see nearly all, a few and a third."""
    given = sized(paged_mqa_logits.OP, seed, T=18, N=32, R=3, P=64, S=width)
    given["request"] = torch.arange(18, dtype=torch.int32) // 6
    given["visible"] = (torch.tensor([width - 5, 7, width // 3])[given["request"].long()] + torch.arange(18) % 6).int()
    return given


@pytest.mark.parametrize("width", [64, 100_000])
def test_long_contexts_score_each_draft_row_as_alone(width):
    """Six rows a request, three requests; every program walks over several tiles."""
    op = paged_mqa_logits.OP
    given = draft_blocks(23, width)
    there = moved(given, "cuda")
    whole = triton_of(op)(**there)
    assert_close(whole.cpu(), op.reference(**given), op.tolerances["logits"])
    for t in (0, 5, 9, 17):
        rows = {n: there[n][t : t + 1] for n in ("q", "weights", "request", "visible")}
        assert torch.equal(triton_of(op)(**there | rows)[0], whole[t])


def test_long_gathered_runs_score_each_token_as_alone():
    """Two requests that meet in a program; programs walk over several tiles."""
    op = mqa_logits.OP
    given = sized(op, 25, M=302, N=32, S=60_000)
    there = moved(given, "cuda")
    whole = triton_of(op)(**there)
    assert_close(whole.cpu(), op.reference(**given), op.tolerances["logits"])
    for t in (0, 5, 150, 151, 301):
        rows = {n: there[n][t : t + 1] for n in ("weights", "starts", "ends")}
        rows["q"] = there["q"].view(torch.uint8)[t : t + 1].view(torch.float8_e4m3fn)
        assert torch.equal(triton_of(op)(**there | rows)[0], whole[t])


@pytest.mark.parametrize("width", [3000, 100_000])
def test_long_contexts_select_inside_candidates_as_from_masked_scores(width):
    """Three draft blocks of six rows; packed scores have the bits of dense ones, and the same rows are selected."""
    op = paged_mqa_logits.OP
    given = draft_blocks(24, width)
    there = moved(given | {"width": width}, "cuda")
    scores = triton_of(op)(**there)
    del there["width"], there["fill"]
    listed = triton_of(CANDIDATE_BLOCKS)(scores, there["visible"], 2048, 8)
    inside = triton_of(candidate_mqa_logits.OP)(**there, candidates=listed, block_size=8)
    whole = torch.nn.functional.pad(scores, (0, 8), value=-torch.inf)
    row = (listed.long()[:, :, None] * 8 + torch.arange(8, device="cuda")).flatten(1)
    assert torch.equal(inside, whole.gather(1, row.clamp_min(0)).masked_fill(row < 0, -torch.inf))
    want = triton_of(SELECT_TOPK)(triton_of(MASK_TO_CANDIDATES)(scores, listed, 8), 512)
    assert torch.equal(triton_of(SELECT_TOPK)(inside, 512, there["visible"], listed, 8), want)
