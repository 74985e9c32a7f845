# SPDX-License-Identifier: Apache-2.0
import numpy
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.kv_cache.compressor_pool import OP, compressor_pool

EPS = 1e-20
WEIGHT = torch.randn(512, generator=torch.Generator().manual_seed(9)).bfloat16()
CAPACITY = 8


def sequence(length: int, seed: int, ratio: int = 2) -> torch.Tensor:
    return torch.randn(length, 512 * ratio, generator=torch.Generator().manual_seed(seed))


def pooled(rows: torch.Tensor, ratio: int) -> numpy.ndarray:
    """Latents of a whole sequence from position 0, in float64 numpy: no chunks, no ring."""
    x = rows.numpy().astype(numpy.float64)
    if ratio == 2:
        value, gate = (
            x[: len(x) // 2 * 2].reshape(-1, 2, 1024)[..., :512],
            x[: len(x) // 2 * 2].reshape(-1, 2, 1024)[..., 512:],
        )
        share = 1 / (1 + numpy.exp(gate[:, 1] - gate[:, 0]))
        x = value[:, 0] * share + value[:, 1] * (1 - share)
    return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + EPS) * WEIGHT.double().numpy()


def run(chunks, state, ratio=2, **more):
    """One step over `chunks`: (rows, first position, ring block) of each request."""
    positions = torch.cat([torch.arange(len(rows)) + first for rows, first, _ in chunks])
    block = torch.cat([torch.full((len(rows),), ring) for rows, _, ring in chunks])
    lengths = torch.tensor([0] + [len(rows) for rows, _, _ in chunks])
    return compressor_pool(
        torch.cat([rows for rows, _, _ in chunks]), positions, state, block * CAPACITY + positions % CAPACITY,
        lengths.cumsum(0).int(), WEIGHT, EPS, ratio, **more,
    )  # fmt: skip


def assert_latents(got: torch.Tensor, want: numpy.ndarray):
    want = torch.from_numpy(want)
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("cuts", [[40], [1] * 40, [7, 1, 1, 12, 3, 16], [39, 1], [2, 38]], ids=str)
def test_chunks_give_the_latents_of_the_whole_sequence(cuts):
    """Two requests step through the same cuts in one batch; the ring starts as NaN."""
    first, second = sequence(40, 1), sequence(40, 2)
    state = torch.full((4, CAPACITY, 1024), torch.nan)
    at, latents = 0, [[], []]
    for cut in cuts:
        part = slice(at, at + cut)
        out = run([(first[part], at, 3), (second[part], at, 1)], state)
        closing = (torch.arange(at, at + cut) + 1) % 2 == 0
        for request, rows in enumerate(out.split(cut)):
            assert (rows[~closing] == 0).all()
            latents[request].append(rows[closing])
        at += cut
    assert_latents(torch.cat(latents[0]), pooled(first, 2))
    assert_latents(torch.cat(latents[1]), pooled(second, 2))


def test_cuts_do_not_change_a_bit():
    rows = sequence(41, 3)
    whole = run([(rows, 0, 1)], torch.zeros(2, CAPACITY, 1024))
    for cut in (1, 2, 7, 8, 9, 40):
        state = torch.full((2, CAPACITY, 1024), torch.nan)
        parts = [run([(rows[a : a + cut], a, 1)], state) for a in range(0, 41, cut)]
        assert torch.equal(torch.cat(parts), whole)


def test_ring_keeps_the_last_rows_and_nothing_else():
    rows, state = sequence(13, 4), torch.full((3, CAPACITY, 1024), torch.nan)
    run([(rows, 5, 2)], state)
    for position in range(5 + 13 - CAPACITY, 5 + 13):
        assert torch.equal(state[2, position % CAPACITY], rows[position - 5])
    assert state[:2].isnan().all()
    short = sequence(2, 5)
    before = state.clone()
    run([(short, 18, 2)], state)
    assert torch.equal(state[2, 2:4], short)
    before[2, 2:4] = short
    assert torch.equal(state[2], before[2])


def test_rejected_drafts_are_overwritten():
    """Six tokens enter, four are rejected; the next step repeats their positions."""
    rows, drafts = sequence(20, 6), sequence(4, 7)
    state = torch.full((2, CAPACITY, 1024), torch.nan)
    run([(torch.cat([rows[:9], drafts]), 0, 1)], state)
    got = run([(rows[9:], 9, 1)], state)
    assert_latents(got[::2], pooled(rows, 2)[4:])


def test_padding_tokens_and_requests_leave_the_ring_alone():
    rows, state = sequence(6, 8), torch.zeros(2, CAPACITY, 1024)
    slots = torch.tensor([CAPACITY, CAPACITY + 1, CAPACITY + 2, -1, -1, -1])
    out = compressor_pool(
        rows,
        torch.tensor([0, 1, 2, 0, 1, 1]),
        state,
        slots,
        torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        WEIGHT,
        EPS,
        2,
    )
    assert torch.equal(state[1, :3], rows[:3]) and not state[1, 3:].any() and not state[0].any()
    assert out[1].any() and not out[[0, 2, 3, 4, 5]].any()


def test_row_before_the_chunk_from_other_ranks():
    rows, gathered = sequence(8, 10), sequence(3, 11)
    ring = torch.randn(3, CAPACITY, 1024, generator=torch.Generator().manual_seed(12))
    state = ring.clone()
    gathered[2] = rows[0]
    ring[1, 4], state[1, 4] = rows[4], rows[4]
    out = run(
        [(rows[1:4], 1, 2), (rows[5:], 5, 1)], state, prev_rows=gathered, prev_row_indices=torch.tensor([2, -1, 7])
    )
    assert_latents(out[[0, 2, 3, 5]], pooled(rows, 2))
    assert torch.equal(state, ring)


def test_ratio_one_normalises_every_valid_token():
    rows = sequence(5, 13, ratio=1)
    rows[3] = 0
    out = compressor_pool(rows, torch.arange(5), None, torch.tensor([9, -1, 0, 4]), None, WEIGHT, EPS, 1)
    want = pooled(rows[:4], 1)
    want[1] = 0
    assert_latents(out[:4], want)
    assert not out[3].any() and not out[4].any()


def test_rows_do_not_depend_on_their_batch():
    rows = sequence(33, 14, ratio=1)
    whole = compressor_pool(rows, torch.arange(33), None, torch.arange(33), None, WEIGHT, EPS, 1)
    for token in (0, 17, 32):
        part = slice(token, token + 1)
        alone = compressor_pool(rows[part], torch.arange(33)[part], None, torch.arange(33)[part], None, WEIGHT, EPS, 1)
        assert torch.equal(alone, whole[part])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ratio": 4}, "ratio is 4, must be 1 or 2"),
        ({"ratio": 1}, "kv_score has 1024 on its last axis, must be 512 at ratio 1"),
        ({"state": None}, "state is missing, ratio 2 needs it"),
        ({"query_start": None}, "query_start is missing, ratio 2 needs it"),
        ({"prev_rows": torch.zeros(1, 1024)}, "prev_rows and prev_row_indices go together"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, "slots has 44 entries for 44 rows and 3 positions"),
    ],
)
def test_contract(change, message):
    given = next(c for c in OP.cases if c.name == "mixed_r2").inputs()
    with pytest.raises(ContractError, match=message):
        compressor_pool(**(given | change))
