# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.engram.engram_lookup import OP, engram_lookup


def e4m3(code):
    """Value of one E4M3 byte."""
    sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle(case):
    given = case.inputs(seed=1)
    got = engram_lookup(**given)
    assert got.dtype == torch.bfloat16 and got.shape == (*given["rows"].shape, 256)
    seen = {True: 0, False: 0}
    for t in range(0, got.shape[0], 9):
        for c in range(0, got.shape[1], 2):
            row = int(given["rows"][t, c])
            own = given["first_row"] <= row < given["end_row"]
            seen[own] += 1
            want = [0.0] * 256
            if own:
                codes = given["table"][row - given["first_row"]].tolist()
                exponents = given["scales"][row - given["first_row"]].tolist()
                want = [math.ldexp(e4m3(code), exponents[i // 32] - 127) for i, code in enumerate(codes)]
            assert got[t, c].double().tolist() == want
    assert got.numel() == 0 or min(seen.values()) > 0


def test_every_code_and_scale_byte():
    """All 256 codes under scale bytes from 0 to 255; exact where every product is a normal bfloat16."""
    table = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    got = engram_lookup(table, scales, torch.arange(256)[:, None], 0, 256)[:, 0].double()
    for byte in range(10, 247):
        for code in range(256):
            want, value = math.ldexp(e4m3(code), byte - 127), got[byte, code].item()
            assert value == want or (math.isnan(want) and math.isnan(value))
    finite = torch.tensor([not math.isnan(e4m3(code)) for code in range(256)])
    assert not got[0, finite].any() and not torch.isfinite(got[255]).any()
    assert got[:, ~finite].isnan().all()


def test_ranges_of_the_ranks_sum_to_the_whole_table():
    given = OP.cases[1].inputs(seed=2) | {"first_row": 0, "end_row": 500}
    given["rows"] = given["rows"] % 500
    whole = engram_lookup(**given)
    parts = torch.zeros_like(whole)
    for first, end in ((0, 123), (123, 124), (124, 500)):
        rank = {"table": given["table"][first:end], "scales": given["scales"][first:end]}
        rank |= {"first_row": first, "end_row": end}
        parts += engram_lookup(**given | rank)
    assert torch.equal(parts, whole) and whole.any()


def test_rows_of_other_ranks_are_not_read_and_columns_may_be_a_slice():
    given = OP.cases[1].inputs(seed=3)
    given["rows"] = torch.randint(990, 1510, (9, 24))
    given["rows"][0] = torch.tensor([-1, 2**62, -(2**63), 999, 1500] + [1000] * 19)
    whole = engram_lookup(**given)
    assert not whole[0, :5].any()
    assert torch.equal(engram_lookup(**given | {"rows": given["rows"][:, 4:7]}), whole[:, 4:7])


def test_table_offsets_past_2_to_the_31_bytes(tmp_path):
    rows = 2**31 // 256 + 10
    path = tmp_path / "table"
    with open(path, "wb") as file:
        file.truncate(rows * 256)
    table = torch.from_file(str(path), shared=True, size=rows * 256, dtype=torch.uint8).view(rows, 256)
    table[rows - 1] = torch.arange(256, dtype=torch.uint8)
    scales = torch.full((rows, 8), 127, dtype=torch.uint8)
    got = engram_lookup(table, scales, torch.tensor([[rows - 1, rows - 2]]), 0, rows)
    assert got[0, 0, :127].double().tolist() == [e4m3(code) for code in range(127)] and not got[0, 1].any()


@pytest.mark.parametrize("change, message", [
    ({"table": lambda x: x.view(torch.float8_e4m3fn)}, "table is float8_e4m3fn, must be uint8"),
    ({"rows": lambda x: x.short()}, "rows is int16"),
    ({"scales": lambda x: x[:-1]}, "scales has 499 on axis R, must be 500"),
    ({"end_row": lambda x: x + 1}, "rows 1000 to 1501 do not fit a table of 500 rows"),
    ({"first_row": lambda x: x + 501}, "rows 1501 to 1500"),
])
def test_contract(change, message):
    given = OP.cases[1].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        engram_lookup(**given)


def test_upstreams_int32_row_numbers_give_the_same_rows():
    given = OP.cases[-1].inputs(seed=9)
    narrow = given | {"rows": given["rows"].int()}
    assert torch.equal(engram_lookup(**given), engram_lookup(**narrow))
