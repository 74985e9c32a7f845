# SPDX-License-Identifier: Apache-2.0
import struct

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.indexer.paged_mqa_logits import OP, paged_mqa_logits
from vllm.ampere.testing.compare import assert_close

NAN_BYTE = 0xFF


def key_in_page(cache, page, row):
    """One key in float64, by the layout spelled out a second time: all codes, then all scales."""
    rows = cache.shape[1]
    flat = cache.as_strided((rows * 132,), (1,), cache.storage_offset() + page * cache.stride(0))
    (scale,) = struct.unpack("<f", bytes(flat[rows * 128 + row * 4 : rows * 128 + row * 4 + 4].tolist()))
    return flat[row * 128 : row * 128 + 128].clone().view(torch.float8_e4m3fn).double() * scale


def derived(given, heads_first=False):
    """Float64, a token and a key at a time; `heads_first` adds the heads before the ReLU, which is wrong."""
    tokens, page_rows = given["q"].shape[0], given["cache"].shape[1]
    out = torch.full((tokens, given["width"]), -torch.inf, dtype=torch.float64)
    for t in range(tokens):
        pages = given["block_table"][int(given["request"][t])].tolist()
        for j in range(int(given["visible"][t])):
            key = key_in_page(given["cache"], pages[j // page_rows], j % page_rows)
            products, weights = given["q"][t].double() @ key, given["weights"][t].double()
            out[t, j] = (weights @ products).clamp_min(0) if heads_first else weights @ products.clamp_min(0)
    return out


@pytest.mark.parametrize("page_rows", [32, 64, 128])
def test_oracle_in_strided_pages_amid_poison(page_rows):
    """Pages lie apart in a pool of NaN bytes, and the rows of the last page that no token sees are NaN."""
    small = next(c for c in OP.cases if c.sizes["R"] == 5)
    given = type(small)("x", small.sizes | {"T": 7, "P": page_rows, "S": 200}, small.make).inputs(seed=page_rows)
    given["visible"] = torch.tensor([0, 1, page_rows, page_rows + 1, 77, 200, 130], dtype=torch.int32)
    given["request"] = torch.tensor([0, 1, 2, 2, 3, 4, 3], dtype=torch.int32)
    pages, size = given["cache"].shape[0], page_rows * 132
    pool = torch.full((50 + pages * (size + 60),), NAN_BYTE, dtype=torch.uint8)
    cache = pool.as_strided(given["cache"].shape, (size + 60, 132, 1), 50)
    cache.copy_(given["cache"])
    for r in range(5):
        seen = int(max(given["visible"][given["request"] == r], default=0))
        for j in range(seen, given["block_table"].shape[1] * page_rows):
            page, row = int(given["block_table"][r, j // page_rows]), j % page_rows
            start = 50 + page * (size + 60)
            pool[start + row * 128 : start + row * 128 + 128] = NAN_BYTE
            pool[start + page_rows * 128 + row * 4 : start + page_rows * 128 + row * 4 + 4] = NAN_BYTE
    given["cache"] = cache
    assert_close(paged_mqa_logits(**given), derived(given), OP.tolerances["logits"])


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_page_size_and_page_order_change_no_bit(case):
    given = case.inputs(seed=1)
    got = paged_mqa_logits(**given)
    assert got.shape == (given["q"].shape[0], given["width"])
    old = given["cache"].shape[1]
    columns = given["block_table"].shape[1] * old
    for rows in (32, 48):
        pages = -(-columns // rows)
        requests = given["block_table"].shape[0]
        cache = torch.full((requests * pages, rows * 132), NAN_BYTE, dtype=torch.uint8)
        flat = given["cache"].flatten(1)
        order = torch.randperm(requests * pages).view(requests, pages)
        for r in range(requests):
            for j in range(columns):
                source, target = flat[int(given["block_table"][r, j // old])], cache[int(order[r, j // rows])]
                a, b = j % old, j % rows
                target[b * 128 : b * 128 + 128] = source[a * 128 : a * 128 + 128]
                target[rows * 128 + b * 4 : rows * 128 + b * 4 + 4] = source[old * 128 + a * 4 : old * 128 + a * 4 + 4]
        moved = given | {"cache": cache.view(-1, rows, 132), "block_table": order.int()}
        assert torch.equal(paged_mqa_logits(**moved), got)


def test_relu_acts_on_each_head_before_the_sum():
    given = OP.cases[1].inputs(seed=2)
    got = paged_mqa_logits(**given)
    assert_close(got, derived(given), OP.tolerances["logits"])
    with pytest.raises(AssertionError, match="relative norm"):
        assert_close(got, derived(given, heads_first=True), OP.tolerances["logits"])


def test_same_bits_twice_alone_or_in_a_batch():
    given = OP.cases[-1].inputs(seed=3)
    whole = paged_mqa_logits(**given)
    assert torch.equal(whole, paged_mqa_logits(**given))
    rows = ("q", "weights", "request", "visible")
    for i in range(0, 33, 4):
        assert torch.equal(paged_mqa_logits(**given | {name: given[name][i : i + 1] for name in rows})[0], whole[i])


def test_a_token_that_sees_nothing_reads_no_table_row():
    given = OP.cases[2].inputs(seed=4)
    given["visible"] = torch.tensor([0, -1, 0, -7, 0, 0], dtype=torch.int32)
    given["request"] = torch.full((6,), 999, dtype=torch.int32)
    assert (paged_mqa_logits(**given) == -torch.inf).all()


def test_offsets_past_2_to_the_31_bytes(tmp_path):
    block, far = 1 << 26, 40
    path = tmp_path / "pool"
    with open(path, "wb") as file:
        file.truncate((far + 1) * block)
    pool = torch.from_file(str(path), shared=True, size=(far + 1) * block, dtype=torch.uint8)
    given = OP.cases[1].inputs(seed=5)
    want = paged_mqa_logits(**given)
    cache = pool.as_strided((far + 1, 64, 132), (block, 132, 1))
    table = torch.arange(far, far - given["block_table"].shape[1], -1, dtype=torch.int32)[None]
    assert int(table.min()) * block > 2**31
    cache[table[0].long()] = given["cache"][given["block_table"][0].long()]
    assert torch.equal(paged_mqa_logits(**given | {"cache": cache, "block_table": table}), want)


class LargestTensor(TorchDispatchMode):
    """Records the most bytes any one operation returns."""

    def __init__(self):
        super().__init__()
        self.largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and func is not torch.ops.aten.as_strided.default:
                self.largest_bytes = max(self.largest_bytes, tensor.nbytes)
        return result


def test_workspace_stays_bounded_at_32768_keys():
    """32 tokens x 32 heads x 32768 keys in float32 would be 128 MiB; the keys of the request are 16 MiB."""
    keys = 32768
    case = OP.cases[2]
    given = type(case)("x", case.sizes | {"T": 32, "R": 1, "S": keys, "P": 128}, case.make).inputs(seed=6)
    given["visible"][:] = keys
    with LargestTensor() as seen:
        got = paged_mqa_logits(**given)
    assert torch.isfinite(got[:, :keys]).all()
    assert seen.largest_bytes <= keys * 128 * 4 + 2**20


@pytest.mark.parametrize("change, message", [
    ({"cache": lambda x: x[..., :131]}, "cache has 131 on axis 132"),
    ({"block_table": lambda x: x.long()}, "block_table is int64"),
    ({"visible": lambda x: x[:-1]}, "visible has 5 on axis T, must be 6"),
    ({"weights": lambda x: x.bfloat16()}, "weights is bfloat16"),
    ({"width": lambda x: 3}, "width is 3"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs(seed=7)
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        paged_mqa_logits(**given)
