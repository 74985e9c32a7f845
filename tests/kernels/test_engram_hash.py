# SPDX-License-Identifier: Apache-2.0
import random

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.engram.engram_hash import OP, engram_hash, hash_multipliers, hash_primes

PAD, POISON = 7, 2**40
PRIMES, MULTIPLIERS = hash_primes(2, 16_000_000), hash_multipliers((1, 14), 99092)


def derived(history, layer):
    """Rows of the n-grams that end at the last of `history` (the whole sequence so far; -1: dead), in Python ints."""
    ids, dead = [], False
    for back in range(4):
        dead = dead or back >= len(history) or history[-1 - back] == -1
        ids.append(PAD if dead else history[-1 - back])
    m, rows, first = MULTIPLIERS[layer].tolist(), [], 0
    for order in (2, 3, 4):
        mixed = 0
        for a, b in zip(ids[:order], m):
            mixed ^= a * b
        for prime in PRIMES[layer, order - 2].tolist():
            rows.append(mixed % prime + first)
            first += prime
    return rows


def run(chunks, layer=0):
    """engram_hash on chunks [(whole sequence, first position, end position), ...] of separate requests."""
    tokens, positions, starts, lookback = [], [], [0], []
    for sequence, first, end in chunks:
        tokens += sequence[first:end]
        positions += range(first, end)
        starts.append(len(tokens))
        lookback.append([sequence[first - 1 - i] if first - 1 - i >= 0 else POISON for i in range(3)])
    return engram_hash(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lookback).view(len(chunks), 3),
        PRIMES[layer],
        MULTIPLIERS[layer],
        PAD,
    )


def test_published_primes():
    flat = PRIMES.flatten().tolist()
    assert flat[:3] == [16000057, 16000079, 16000081] and flat[-1] == 16000889
    assert PRIMES.sum((1, 2)).tolist() == [384006168, 384016682]
    assert len(set(flat)) == 48 and flat == sorted(flat)


def test_primes_against_a_sieve():
    sieve = bytearray([1]) * 3000
    for n in range(2, 60):
        sieve[n * n :: n] = bytes(len(sieve[n * n :: n]))
    for vocab in (2, 3, 4, 100, 1009):
        want = [n for n in range(vocab, 3000) if sieve[n] and n > 1][:72]
        assert hash_primes(3, vocab).flatten().tolist() == want


def test_published_multipliers():
    assert MULTIPLIERS.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]
    assert int(MULTIPLIERS.max()) * 99091 < 2**63


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle_on_the_cases(case):
    given = case.inputs(seed=1)
    got = engram_hash(**given)
    starts = given["query_start"].tolist()
    for r, (first, end) in enumerate(zip(starts, starts[1:])):
        for t in range(first, end):
            position = int(given["positions"][t])
            before = given["lookback"][r].tolist()[::-1] + given["tokens"][first : t + 1].tolist()
            assert got[t].tolist() == derived(before[max(len(before) - position - 1, 0) :], 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_every_chunk_edge(layer):
    """However a sequence is cut in chunks, each token hashes the same; what lies before position 0 is poison."""
    source = random.Random(layer)
    sequence = [source.randrange(-1, 99092) if i % 5 else -1 for i in range(11)]
    want = torch.tensor([derived(sequence[: t + 1], layer) for t in range(11)])
    for first in range(11):
        for end in range(first + 1, 12):
            assert torch.equal(run([(sequence, first, end)], layer), want[first:end])


@settings(deadline=None, max_examples=60)
@over(st.lists(st.tuples(st.lists(st.integers(-1, 99091), max_size=9), st.integers(0, 9)), min_size=1, max_size=5))
def test_batches_of_chunks_with_empty_ones(requests):
    chunks = [(sequence, min(first, len(sequence)), len(sequence)) for sequence, first in requests]
    want = [derived(s[: t + 1], 0) for s, first, end in chunks for t in range(first, end)]
    assert run(chunks).tolist() == want


def test_a_dead_token_hides_itself_and_all_before_it():
    alive, dead = [11, 12, 13, 14, 15], [11, 12, -1, 14, 15]
    got, other = run([(dead, 0, 5)]), run([([99, 98, -1, 14, 15], 0, 5)])
    assert torch.equal(got[2:], other[2:])
    assert got[2].tolist() == derived([-1], 0) == derived([], 0)
    assert not torch.equal(got[3], run([(alive, 0, 5)])[3])
    assert torch.equal(got[:2], run([(alive, 0, 5)])[:2])


def test_columns_own_disjoint_ranges():
    got = run([([i * 977 % 99092 for i in range(500)], 0, 500)], 1)
    ends = PRIMES[1].flatten().cumsum(0)
    assert ((got >= ends - PRIMES[1].flatten()) & (got < ends)).all()


def test_padding_tokens_get_valid_rows():
    given = OP.cases[2].inputs(seed=2)
    want = engram_hash(**given)
    given["tokens"] = torch.cat([given["tokens"], torch.tensor([-1, 0, 5])])
    given["positions"] = torch.cat([given["positions"], torch.zeros(3, dtype=torch.int64)])
    got = engram_hash(**given)
    assert torch.equal(got[:-3], want) and (got[-3:] >= 0).all() and (got[-3:] < PRIMES[0].sum()).all()


@pytest.mark.parametrize("change, message", [
    ({"query_start": lambda x: x[:-1]}, "3 query starts for 3 requests"),
    ({"lookback": lambda x: x[:, :2]}, "lookback has 2 on axis 3"),
    ({"tokens": lambda x: x.int()}, "tokens is int32, must be int64"),
    ({"primes": lambda x: x.flatten()}, "primes has shape"),
    ({"lookback": lambda x: x[:0], "query_start": lambda x: x[:1]}, "6 tokens of no request"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        engram_hash(**given)
