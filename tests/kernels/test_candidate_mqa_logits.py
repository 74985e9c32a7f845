# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from tests.kernels.test_paged_mqa_logits import NAN_BYTE, LargestTensor, derived
from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.indexer.candidate_mqa_logits import OP, candidate_mqa_logits
from vllm.ampere.kernels.indexer.candidate_topk import candidate_blocks, mask_to_candidates, select_topk
from vllm.ampere.kernels.indexer.paged_mqa_logits import paged_mqa_logits
from vllm.ampere.testing.compare import assert_close

TOKENS = ("q", "weights", "request", "visible", "candidates")


def sized(seed, **sizes):
    case = OP.cases[2]
    return type(case)("x", case.sizes | sizes, case.make).inputs(seed)


def dense(given):
    """The scores of every key, by the op that this one spares work."""
    rest = {name: value for name, value in given.items() if name not in ("candidates", "block_size")}
    return paged_mqa_logits(**rest, width=max(1, int(given["visible"].max())))


def packed(scores, given):
    """Listed columns of dense scores [T, S], a column at a time."""
    size = given["block_size"]
    out = scores.new_full((len(scores), given["candidates"].shape[1] * size), -torch.inf)
    for t, listed in enumerate(given["candidates"].tolist()):
        for i, block in enumerate(listed):
            for member in range(size):
                if block >= 0 and block * size + member < scores.shape[1]:
                    out[t, i * size + member] = scores[t, block * size + member]
    return out


@pytest.mark.parametrize("page_rows, size", [(32, 8), (48, 5), (64, 8)])
def test_oracle_in_strided_pages_amid_poison(page_rows, size):
    """Pages lie apart at odd bytes; keys that no token of their request lists are NaN."""
    given = sized(page_rows, T=7, N=8, R=3, P=page_rows, S=200, L=9, block_size=size)
    given["visible"] = torch.tensor([0, 1, page_rows, page_rows + 1, 77, 200, 130], dtype=torch.int32)
    given["request"] = torch.tensor([0, 1, 2, 2, 0, 1, 0], dtype=torch.int32)
    pages, bytes_ = given["cache"].shape[0], page_rows * 132
    pool = torch.full((50 + pages * (bytes_ + 61),), NAN_BYTE, dtype=torch.uint8)
    cache = pool.as_strided(given["cache"].shape, (bytes_ + 61, 132, 1), 50)
    read = {
        (int(given["block_table"][r, key // page_rows]), key % page_rows)
        for r, listed in zip(given["request"].tolist(), given["candidates"].tolist())
        for block in listed if block >= 0 for key in range(block * size, min(block * size + size, 200))
    }  # fmt: skip
    flat, source = cache.flatten(1), given["cache"].flatten(1)
    assert flat.data_ptr() == cache.data_ptr()
    for page, row in read:
        for start, width in ((row * 128, 128), (page_rows * 128 + row * 4, 4)):
            flat[page, start : start + width] = source[page, start : start + width]
    whole = derived(given | {"width": 200})
    assert_close(candidate_mqa_logits(**given | {"cache": cache}), packed(whole, given), OP.tolerances["logits"])


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_listed_scores_have_the_bits_of_all_scores(case):
    given = case.inputs(seed=1)
    got = candidate_mqa_logits(**given)
    assert got.shape == (len(given["q"]), given["candidates"].shape[1] * given["block_size"])
    if len(got):
        assert torch.equal(got, packed(dense(given), given))
        assert got.isfinite().any()


@pytest.mark.parametrize("blocks", [3, 12, 200])
def test_selection_inside_a_list_is_that_of_the_masked_scores(blocks):
    """Ties, a NaN key and lists of another layer's making: the rows are equal, and so is their order."""
    given = sized(2, T=9, N=8, R=2, P=32, S=700)
    given["q"][4] = given["q"][3]
    given["weights"][5] = 0.0
    given["cache"].flatten(1)[:, 3 * 128 + 7] = NAN_BYTE
    scores = dense(given)
    other = scores.flip(0).masked_fill(torch.arange(scores.shape[1]) >= given["visible"][:, None], -torch.inf)
    given["candidates"] = candidate_blocks(other, given["visible"], blocks, 8)
    assert (given["candidates"] >= 0).any()
    for k in (1, 17, 64, 900):
        want = select_topk(mask_to_candidates(scores, given["candidates"], 8), k)
        got = select_topk(candidate_mqa_logits(**given), k, given["visible"], given["candidates"], 8)
        assert torch.equal(got, want)
    assert scores[5, : int(given["visible"][5])].eq(0).sum() > 1 or int(given["visible"][5]) < 2


def test_same_bits_twice_alone_or_in_a_batch():
    given = OP.cases[-1].inputs(seed=3)
    whole = candidate_mqa_logits(**given)
    assert torch.equal(whole, candidate_mqa_logits(**given))
    for i in range(0, 33, 4):
        alone = given | {name: given[name][i : i + 1] for name in TOKENS}
        assert torch.equal(candidate_mqa_logits(**alone)[0], whole[i])


def test_blocks_that_a_token_does_not_see_are_minus_infinity():
    given = sized(4, T=4, N=8, R=1, P=32, S=100, L=4)
    given["candidates"][:] = torch.tensor([0, 2, 12, 2**31 - 1], dtype=torch.int32)
    given["visible"] = torch.tensor([0, 3, 18, 100], dtype=torch.int32)
    seen = candidate_mqa_logits(**given) > -torch.inf
    assert [row.nonzero().flatten().tolist() for row in seen] == [
        [], [0, 1, 2], [*range(8), 8, 9], [*range(16), *range(16, 20)],
    ]  # fmt: skip


def test_a_token_that_sees_nothing_reads_no_table_row():
    given = sized(5, T=6, N=8, R=1, P=32, S=100)
    given["visible"] = torch.tensor([0, -1, 0, -7, 0, -(2**31)], dtype=torch.int32)
    given["request"] = torch.full((6,), 999, dtype=torch.int32)
    assert (candidate_mqa_logits(**given) == -torch.inf).all()


def test_workspace_stays_bounded_at_32768_keys():
    """32 tokens x 32768 keys of float32 scores would be 4 MiB, x 32 heads 128 MiB; the keys of the request are 16 MiB."""
    keys = 32768
    given = sized(6, T=32, N=32, R=1, P=128, S=keys, L=64)
    given["visible"][:] = keys
    with LargestTensor() as seen:
        got = candidate_mqa_logits(**given)
    assert got.shape == (32, 512)
    assert seen.largest_bytes <= keys * 128 * 4 + 2**20


@pytest.mark.parametrize("change, message", [
    ({"cache": lambda x: x[..., :131]}, "cache has 131 on axis 132"),
    ({"candidates": lambda x: x.long()}, "candidates is int64"),
    ({"candidates": lambda x: x[:-1]}, "candidates has 5 on axis T, must be 6"),
    ({"block_size": lambda x: 0}, "block_size is 0, must be at least 1"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs(seed=7)
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        candidate_mqa_logits(**given)
