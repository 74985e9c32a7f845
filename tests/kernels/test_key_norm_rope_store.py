# SPDX-License-Identifier: Apache-2.0
import math
import struct

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.indexer.key_norm_rope_store import OP, key_norm_rope_store

POISON = 0xA7


def derived(given, token):
    """Normalised, rotated key of one token as Python floats, each step rounded as the model rounds it."""
    k = given["k"][token].double().tolist()
    factor = 1 / math.sqrt(math.fsum(v * v for v in k) / 128 + given["eps"])
    weight = given["norm_weight"].double().tolist()
    k = torch.tensor([v * factor * w for v, w in zip(k, weight)]).bfloat16().double().tolist()
    position = int(given["positions"][token])
    table = given["cos_sin"][position - position % given["ratio"]].double().tolist()
    for i in range(32):
        turned = complex(k[64 + 2 * i], k[65 + 2 * i]) * complex(table[i], table[32 + i])
        k[64 + 2 * i], k[65 + 2 * i] = turned.real, turned.imag
    return torch.tensor(k).bfloat16().double()


def stored(page, row, rows):
    """Key and scale at a row of a page given as bytes: the layout spelled out a second time."""
    codes = torch.frombuffer(bytearray(page[row * 128 : row * 128 + 128]), dtype=torch.float8_e4m3fn)
    (scale,) = struct.unpack_from("<f", page, rows * 128 + row * 4)
    return codes.double() * scale, scale


def page_bytes(cache, index):
    rows, width = cache.shape[1:]
    return bytes(cache.as_strided((rows * width,), (1,), cache.storage_offset() + index * cache.stride(0)).tolist())


@pytest.mark.parametrize("page_rows", [32, 64, 128])
@pytest.mark.parametrize("ratio", [1, 2])
def test_oracle_in_strided_pages(page_rows, ratio):
    """Keys land where the layout says; every other byte, in and between the pages, keeps its poison."""
    given = OP.cases[-1].inputs(seed=page_rows + ratio)
    pages, tokens = 6, given["k"].shape[0]
    block = page_rows * 132 + 444
    pool = torch.full((pages * block,), POISON, dtype=torch.uint8)
    cache = pool.as_strided((pages, page_rows, 132), (block, 132, 1), 100)
    slots = torch.randperm(pages * page_rows, generator=torch.Generator().manual_seed(1))[:tokens]
    slots[::5] = -1
    given |= {"cache": cache, "slots": slots, "ratio": ratio, "positions": torch.arange(tokens) + 3}
    key_norm_rope_store(**given)
    touched = torch.zeros_like(pool, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0 or (int(given["positions"][token]) + 1) % ratio:
            continue
        page, row = divmod(slot, page_rows)
        start = 100 + page * block
        touched[start + row * 128 : start + row * 128 + 128] = True
        touched[start + page_rows * 128 + row * 4 : start + page_rows * 128 + row * 4 + 4] = True
        if token % 8 == 3:
            got, scale = stored(page_bytes(cache, page), row, page_rows)
            want = derived(given, token)
            mantissa, exponent = math.frexp(max(1e-4, want.abs().max().item()) / 448)
            assert scale == math.ldexp(1.0, exponent - (mantissa == 0.5))
            assert ((got - want).abs() <= want.abs() * (2**-4 + 2**-7) + scale * 2**-10).all()
    assert touched.any() and (pool[~touched] == POISON).all()


def test_only_the_token_that_closes_a_group_writes():
    given = OP.cases[-1].inputs(seed=2)
    cache = torch.full_like(given["cache"][:2], POISON)
    key_norm_rope_store(**given | {
        "cache": cache, "slots": torch.tensor([0, 1, 2, 3]), "positions": torch.tensor([6, 7, 8, 9]), "ratio": 2,
    })
    codes = cache.flatten(1)[0, : 128 * 4].view(4, 128)
    assert [bool((row != POISON).any()) for row in codes] == [False, True, False, True]


def test_the_group_takes_the_position_of_its_first_token():
    given = OP.cases[1].inputs(seed=3)
    one = {"slots": torch.tensor([0]), "cache": given["cache"]}
    key_norm_rope_store(**given | one | {"positions": torch.tensor([41]), "ratio": 2})
    odd = given["cache"].clone()
    key_norm_rope_store(**given | one | {"positions": torch.tensor([40]), "ratio": 1})
    assert torch.equal(odd, given["cache"])
    key_norm_rope_store(**given | one | {"positions": torch.tensor([41]), "ratio": 1})
    assert not torch.equal(odd, given["cache"])


def test_rows_that_are_not_written_may_be_nan_and_slots_may_be_fewer_than_tokens():
    given = OP.cases[2].inputs(seed=4)
    given |= {"slots": torch.tensor([3, -1, 5]), "ratio": 1}
    clean = given["cache"].clone()
    key_norm_rope_store(**given | {"cache": clean})
    given["k"][1] = float("nan")
    given["k"][3:] = float("nan")
    key_norm_rope_store(**given)
    assert torch.equal(clean, given["cache"]) and clean.any()


def test_an_all_zero_key_stays_zero():
    given = OP.cases[1].inputs(seed=5)
    given |= {"slots": torch.tensor([1]), "ratio": 1, "k": torch.zeros_like(given["k"])}
    key_norm_rope_store(**given)
    key, scale = stored(page_bytes(given["cache"], 0), 1, given["cache"].shape[1])
    assert not key.any() and scale == 2.0**-22


def test_offsets_past_2_to_the_31_bytes(tmp_path):
    """A sparse file stands for the pool: nothing but the pages written takes room."""
    block, far = 1 << 26, 37
    path = tmp_path / "pool"
    with open(path, "wb") as file:
        file.truncate((far + 1) * block)
    cache = torch.from_file(str(path), shared=True, size=(far + 1) * block, dtype=torch.uint8)
    cache = cache.as_strided((far + 1, 64, 132), (block, 132, 1))
    assert far * block > 2**31
    given = OP.cases[1].inputs(seed=6) | {"ratio": 1}
    small = torch.zeros(1, 64, 132, dtype=torch.uint8)
    key_norm_rope_store(**given | {"cache": small, "slots": torch.tensor([9])})
    key_norm_rope_store(**given | {"cache": cache, "slots": torch.tensor([far * 64 + 9])})
    assert torch.equal(cache[far], small[0]) and small.any()
    assert not cache[:far].any()


def test_same_bits_alone_and_in_a_batch():
    given = OP.cases[-1].inputs(seed=7) | {"ratio": 1}
    key_norm_rope_store(**given)
    token = 77
    alone = torch.zeros_like(given["cache"])
    slot = max(int(given["slots"][token]), 0)
    key_norm_rope_store(**given | {
        "cache": alone, "k": given["k"][token : token + 1], "positions": given["positions"][token : token + 1],
        "slots": torch.tensor([slot]),
    })
    again = torch.zeros_like(given["cache"])
    slots = given["slots"].clone()
    slots[slots == slot] = -1
    slots[token] = slot
    key_norm_rope_store(**given | {"cache": again, "slots": slots})
    keys = [stored(page_bytes(cache, slot // 128), slot % 128, 128)[0] for cache in (alone, again)]
    assert torch.equal(*keys) and keys[0].any()


@pytest.mark.parametrize("change, message", [
    ({"k": lambda x: x.float()}, "k is float32, must be bfloat16"),
    ({"k": lambda x: x[:5]}, "129 slots for 5 keys"),
    ({"positions": lambda x: x[:5]}, "129 slots for 129 keys and 5 positions"),
    ({"cache": lambda x: x[..., :68].contiguous()}, "cache has 68 on axis 132"),
    ({"cache": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)}, "each page of cache must be dense"),
    ({"ratio": lambda x: 4}, "ratio is 4, must be 1 or 2"),
    ({"slots": lambda x: x.int()}, "slots is int32, must be int64"),
])
def test_contract(change, message):
    given = OP.cases[-1].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    before = given["cache"].clone()
    with pytest.raises(ContractError, match=message):
        key_norm_rope_store(**given)
    assert torch.equal(before, given["cache"])
