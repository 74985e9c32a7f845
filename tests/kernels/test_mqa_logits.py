# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.indexer.mqa_logits import OP, mqa_logits
from vllm.ampere.testing.compare import assert_close


def derived(q, weights, key, scale):
    """One logit in float64, head by head."""
    total = 0.0
    for h in range(q.shape[0]):
        product = float((q[h].double() * key.double()).sum())
        total += float(weights[h]) * (product if product > 0 else 0.0)
    return total * float(scale)


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_oracle_one_element_at_a_time(case):
    given = case.inputs(seed=1)
    got = mqa_logits(**given)
    tokens, width = got.shape
    assert got.dtype == torch.float32 and width == given["width"]
    for i in range(0, tokens, 7):
        start, end = int(given["starts"][i]), int(given["ends"][i])
        assert (got[i, max(end - start, 0) :] == -torch.inf).all()
        columns = range(0, end - start, 5)
        keys = [(given["keys"][start + j], given["key_scales"][start + j]) for j in columns]
        want = torch.tensor([derived(given["q"][i], given["weights"][i], *key) for key in keys], dtype=torch.float64)
        assert_close(got[i, list(columns)], want, OP.tolerances["logits"], f"token {i}")


@pytest.mark.parametrize("case", OP.cases[1:], ids=lambda c: c.name)
def test_oracle_whole_array(case):
    given = case.inputs(seed=2)
    got = mqa_logits(**given)
    products = torch.einsum("mnd,sd->mns", given["q"].double(), given["keys"].double()).clamp_min(0)
    full = torch.einsum("mns,mn,s->ms", products, given["weights"].double(), given["key_scales"].double())
    column = given["starts"][:, None] + torch.arange(given["width"])
    want = full.gather(1, column.clamp_max(full.shape[1] - 1)).masked_fill(column >= given["ends"][:, None], -torch.inf)
    assert_close(got, want, OP.tolerances["logits"])


def test_relu_acts_on_each_head_before_the_sum():
    """Negative control: summing the heads first is far outside the tolerance."""
    given = OP.cases[-1].inputs(seed=3)
    got = mqa_logits(**given)
    products = torch.einsum("mnd,sd->mns", given["q"].double(), given["keys"].double())
    late = torch.relu(torch.einsum("mns,mn->ms", products, given["weights"].double())) * given["key_scales"].double()
    column = given["starts"][:, None] + torch.arange(given["width"])
    late = late.gather(1, column.clamp_max(late.shape[1] - 1)).masked_fill(column >= given["ends"][:, None], -torch.inf)
    with pytest.raises(AssertionError, match="relative norm"):
        assert_close(got, late, OP.tolerances["logits"])


def test_head_order_does_not_matter_beyond_rounding_and_key_order_moves_columns():
    given = OP.cases[2].inputs(seed=4)
    given |= {"starts": torch.zeros_like(given["starts"]), "ends": torch.full_like(given["ends"], given["width"])}
    got = mqa_logits(**given)
    heads, keys = torch.randperm(8), torch.randperm(given["width"])
    q, k = given["q"].view(torch.uint8), given["keys"].view(torch.uint8)
    mixed = {"q": q[:, heads].view(torch.float8_e4m3fn), "weights": given["weights"][:, heads]}
    assert_close(mqa_logits(**given | mixed), got, OP.tolerances["logits"])
    moved = {"keys": k[keys].view(torch.float8_e4m3fn), "key_scales": given["key_scales"][keys]}
    assert torch.equal(mqa_logits(**given | moved), got[:, keys])


def test_nan_in_keys_nobody_sees_and_in_one_that_is_seen():
    given = OP.cases[2].inputs(seed=5)
    given |= {"starts": torch.full_like(given["starts"], 10), "ends": torch.full_like(given["ends"], 60)}
    clean = mqa_logits(**given)
    given["keys"].view(torch.uint8)[:10] = 0x7F
    given["key_scales"][60:] = torch.nan
    assert torch.equal(mqa_logits(**given), clean)
    given["keys"].view(torch.uint8)[12] = 0xFF
    got = mqa_logits(**given)
    others = torch.arange(given["width"]) != 2
    assert got[:, 2].isnan().all() and torch.equal(got[:, others], clean[:, others])


def test_tokens_that_see_nothing():
    given = OP.cases[2].inputs(seed=6)
    given |= {"ends": given["starts"] - (torch.arange(17) % 2).int()}
    assert (mqa_logits(**given) == -torch.inf).all()


def test_same_bits_twice_and_alone_or_in_a_batch():
    given = OP.cases[-1].inputs(seed=7)
    whole = mqa_logits(**given)
    assert torch.equal(whole, mqa_logits(**given))
    rows = ("q", "weights", "starts", "ends")
    for i in range(0, 65, 13):
        alone = mqa_logits(**given | {name: given[name][i : i + 1] for name in rows})
        assert torch.equal(alone[0], whole[i])


@pytest.mark.parametrize("change, message", [
    ({"q": lambda x: x.float()}, "q is float32, must be float8_e4m3fn"),
    ({"keys": lambda x: x.view(torch.uint8)}, "keys is uint8"),
    ({"key_scales": lambda x: x[:-1]}, "key_scales has 699 on axis S, must be 700"),
    ({"ends": lambda x: x.long()}, "ends is int64"),
    ({"width": lambda x: 3}, "width is 3"),
])
def test_contract(change, message):
    given = OP.cases[2].inputs()
    given |= {name: edit(given[name]) for name, edit in change.items()}
    with pytest.raises(ContractError, match=message):
        mqa_logits(**given)
