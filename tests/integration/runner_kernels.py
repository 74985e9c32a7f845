# SPDX-License-Identifier: Apache-2.0
"""Script: what the CPU engine runs in place of vLLM's Triton kernels, against those kernels, interpreted.

Prints "NAME: N tensors equal" for each. Inputs are fresh in every run, outputs and what lies behind a row are poisoned.
"""

import random
import sys

import torch

from vllm.ampere.integration.cpu import model
from vllm.ampere.kernels.engram.engram_hash import hash_multipliers, hash_primes

TRIALS, MOST, CAPACITY, POISON = 6, 5, 700, -77
COLUMNS_BEHIND = 3  # of a block table, beyond what any request holds


class Batch:
    """A batch of up to four requests; `draw(low, high, *shape)` gives integers, high included."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.requests = int(self.draw(1, 4))
        self.lengths = torch.cat([self.draw(1, 2, 1), self.draw(1, 150, 3)])[: self.requests]
        self.lengths = self.lengths[torch.randperm(self.requests, generator=self.generator)]
        self.computed = self.draw(0, 300, self.requests)
        self.tokens = int(self.lengths.sum())
        self.query_start = torch.cat([torch.zeros(1), self.lengths.cumsum(0)]).int()
        self.seq_lens = (self.computed + self.lengths).int()
        self.owner = torch.arange(self.requests).repeat_interleave(self.lengths)
        self.positions = torch.cat([torch.arange(n) + c for n, c in zip(self.lengths.tolist(), self.computed.tolist())])
        self.index = torch.randperm(MOST, generator=self.generator)[: self.requests].int()
        self.page_rows = torch.tensor([32, 128, 4], dtype=torch.int32)
        self.tables = [self.draw(0, 400, MOST, 460 // rows + COLUMNS_BEHIND).int() for rows in self.page_rows.tolist()]
        self.strides = torch.tensor([table.stride(0) for table in self.tables])

    def draw(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=self.generator)

    def logits(self, rows: int, vocabulary: int) -> torch.Tensor:
        return torch.randn(rows, vocabulary, generator=self.generator)

    def mask(self, *shape: int) -> torch.Tensor:
        return self.draw(0, 1, *shape).bool()

    def by_request(self, values: torch.Tensor) -> torch.Tensor:
        """int32 [MOST] with the batch's values where its requests are."""
        out = torch.full((MOST,), 10_000, dtype=torch.int32)
        out[self.index.long()] = values.int()
        return out


def poisoned(*shape: int, dtype=torch.int32) -> torch.Tensor:
    return torch.full(shape, POISON).to(dtype)


def pointers(tensors) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


# Each returns the grid, positional arguments, named ones, and the tensors that are written. Pointers in them lead into
# the batch's tables.


def gather_block_tables(b: Batch):
    targets = [poisoned(*table.shape) for table in b.tables]
    held = b.draw(0, 460 // 128, len(b.tables), MOST).int()
    reach = torch.tensor([127, 0, 130], dtype=torch.int32)
    args = (b.index, pointers(b.tables), pointers(targets), b.strides, held, held.stride(0), b.requests,
            b.by_request(b.computed), reach, b.page_rows)
    return (3, MOST), args, {"MASK_SLIDING_WINDOW": bool(b.draw(0, 1)), "BLOCK_SIZE": 1024}, targets


def slot_mappings(b: Batch):
    if b.requests > 1:
        b.index[int(b.draw(0, b.requests - 1))] = -1
    out = poisoned(3, CAPACITY, dtype=torch.int64)
    enabled = torch.tensor([True, True, bool(b.draw(0, 1))])
    args = (CAPACITY, b.index, b.query_start, b.positions, pointers(b.tables), b.strides, b.page_rows, enabled,
            torch.ones(3, dtype=torch.bool), out, out.stride(0), 0)
    named = {"CP_SIZE": 1, "CP_INTERLEAVE": 1, "PAD_ID": -1, "TRITON_BLOCK_SIZE": 1024}
    return (3, b.requests + 1), args, named, [out]


def apply_writes(b: Batch):
    several, lengths = bool(b.draw(0, 1)), b.draw(0, 5, 4)
    targets = [poisoned(*table.shape) for table in b.tables]
    group = b.draw(0, 2, 4).int()
    given = (pointers(targets), b.strides) if several else (targets[0], targets[0].stride(0))
    # Rows differ: the order of two writes to one row is nobody's promise.
    args = (*given, torch.randperm(MOST, generator=b.generator)[:4].int(), b.draw(0, 1, 4).int(),
            b.draw(0, 400, int(lengths.sum())).int(), lengths.cumsum(0).int(), group if several else None)
    return (4, 1), args, {"BLOCK_SIZE": 1024, "MULTI_GROUP": several}, targets


def token_requests(b: Batch):
    out, tokens = poisoned(CAPACITY), b.tokens + 9
    return ((tokens + 255) // 256,), (b.query_start, out, b.requests, b.tokens, tokens), {}, [out]


def gather_lens(b: Batch):
    out, decodes = poisoned(MOST), int(b.draw(0, b.requests - 1))
    start = torch.minimum(b.draw(0, 200, b.requests), b.seq_lens).int()
    args = (out, b.seq_lens, b.query_start, start, b.requests - decodes, decodes, 128)
    return (1,), args, {"BLOCK_SIZE": 8}, [out]


def draft_window(b: Batch):
    width, rows, offset = 320, b.tokens - 1, 1
    out, lens = poisoned(rows + 2, 1, width), poisoned(rows + 2)
    args = (out, width, lens, 128, width - 8, b.query_start, b.seq_lens, b.owner.int(), b.mask(b.tokens), b.tables[0],
            b.tables[0].stride(0), 32, offset)
    return (rows,), args, {"TRITON_BLOCK_SIZE": 1024}, [out, lens]


def uniform_decode(b: Batch):
    width, tokens = b.tables[0].stride(0), 3 * b.requests
    lens, expanded, ones = poisoned(tokens + 2), poisoned(tokens + 2, width), poisoned(tokens + 2)
    args = (b.draw(0, 9, b.requests).int(), lens, b.tables[0], width, expanded, width, ones, 3)
    return (tokens,), args, {"BLOCK_SIZE": 1024}, [lens, expanded, ones]


def compressed_slots(b: Batch):
    out, slots = poisoned(CAPACITY, dtype=torch.int64), torch.where(b.mask(b.tokens), 5, -1)
    args = (out, slots, b.query_start, b.seq_lens, b.tables[0], b.tables[0].stride(0), 32, 1, 1)
    named = {"COMPRESS_RATIO": int(b.draw(1, 2)), "PAD_ID": -1, "TRITON_BLOCK_SIZE": 1024}
    return (b.requests,), args, named, [out]


def draft_inputs(b: Batch):
    anchored = bool(b.draw(0, 1))
    steps, queries, most_length = 5, 5 if anchored else 6, 400
    by_row = (torch.int32, torch.int64, torch.bool, torch.int32, torch.int32, torch.int64, torch.int64, torch.int64)
    outs = [poisoned(CAPACITY, dtype=dtype) for dtype in by_row]
    outs += [poisoned(MOST * steps, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.int32)]
    outs += [poisoned(MOST, dtype=torch.float32), poisoned(MOST, dtype=torch.int64)]
    rejected = torch.minimum(b.draw(0, 2, b.requests), b.lengths - 1).int()
    args = (*outs, b.positions, b.query_start, b.index, b.draw(0, 500, MOST, 1), b.draw(0, 500, 1, MOST).int(),
            b.draw(0, 2, b.requests).int(), rejected, b.logits(1, MOST)[0], b.draw(0, 2**40, MOST), b.tables[0],
            b.tables[0].stride(0), 505, 32, queries, steps, MOST, CAPACITY - 1, most_length, 0)
    named = {"SAMPLE_FROM_ANCHOR": anchored, "PAD_SLOT_ID": -1, "CP_SIZE": 1, "CP_INTERLEAVE": 1, "BLOCK_SIZE": 256}
    return (b.requests, (int(b.lengths.max()) + queries + 255) // 256), args, named, outs


def token_logprobs(b: Batch):
    logits, ids = b.logits(b.tokens, 515)[:, :512], b.draw(0, 511, b.tokens, 40)
    out = poisoned(b.tokens, 40, dtype=torch.float32)
    args = (out, logits, logits.stride(0), ids, ids.stride(0), 40, 512)
    return (b.tokens,), args, {"BLOCK_SIZE": 1024, "TOPK_BLOCK_SIZE": 64}, [out]


def token_ranks(b: Batch):
    logits = b.draw(-9, 9, b.tokens, 515).float()[:, :512]  # ties
    out = poisoned(b.tokens, dtype=torch.int64)
    return (b.tokens,), (out, logits, logits.stride(0), b.draw(0, 511, b.tokens), 512), {"BLOCK_SIZE": 8192}, [out]


def hash_ids(b: Batch):
    primes, multipliers = hash_primes(2, 5000), hash_multipliers((1, 4), 300)
    flat = primes.flatten(1)
    offsets = flat.cumsum(1) - flat
    ids, tokens = b.draw(0, 399, b.tokens), b.tokens
    out = poisoned(tokens, 2, flat.shape[1])
    lookback = b.draw(-1, 399, MOST, 3)
    args = (ids, b.draw(0, 299, 400).int(), b.draw(0, 9, tokens) == 0, b.positions, None, b.query_start, multipliers,
            primes, offsets, None, lookback, b.draw(0, 4, MOST, 3) == 0, out, tokens, 0, 7)
    strides = {"input_stride": 1, "mask_stride": 1, "position_stride": 1, "table_stride": 0, "table_col_stride": 0,
               "query_stride": 1, "lookback_row_stride": 3, "lookback_col_stride": 1, "lookback_mask_row_stride": 3,
               "lookback_mask_col_stride": 1}
    named = {"num_query_rows": b.requests, "num_table_rows": 0, "max_blocks": 0, "cache_block_size": 32, "MAX_NGRAM": 4,
             "num_heads": 8, "BLOCK_T": 32, "BLOCK_H": 8, "dead_id": -1, "lookback_depth": 3}
    return ((tokens + 31) // 32, 2), args, strides | named, [out]


CASES = (hash_ids, gather_block_tables, slot_mappings, apply_writes, token_requests, gather_lens, draft_window,
         uniform_decode, compressed_slots, draft_inputs, token_logprobs, token_ranks)


def main(seed: int) -> None:
    launchers = {function.__name__: getattr(owner, name) for owner, name, function in model.LAUNCHED}
    for case in CASES:
        launcher, compared = launchers[case.__name__], 0
        for trial in range(seed, seed + TRIALS):
            written = []
            for kernel in (launcher.upstream, launcher):
                batch = Batch(trial)  # lives as long as the pointers into it
                grid, args, named, outs = case(batch)
                kernel[grid](*args, **named)
                written.append(outs)
            for want, got in zip(*written, strict=True):
                if case is token_logprobs:
                    torch.testing.assert_close(got, want, rtol=0, atol=4e-6)
                assert case is token_logprobs or torch.equal(got, want), f"{case.__name__}, seed {trial}"
                compared += bool((want != poisoned(1, dtype=want.dtype)).any())
        print(f"{case.__name__}: {compared} tensors equal")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else random.randrange(2**31))
