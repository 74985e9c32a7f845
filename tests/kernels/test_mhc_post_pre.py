# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.errors import ContractError
from vllm.ampere.kernels.mhc.mhc_post import mhc_post
from vllm.ampere.kernels.mhc.mhc_post_pre import OP, mhc_post_pre
from vllm.ampere.kernels.mhc.mhc_pre import mhc_pre
from vllm.ampere.testing.compare import assert_close


@pytest.mark.parametrize("case", OP.cases, ids=lambda c: c.name)
def test_equals_the_two_ops_one_after_the_other(case):
    given = case.inputs(seed=1)
    aux = given.pop("capture_aux")
    streams, *outputs, mean = mhc_post_pre(**given, capture_aux=aux)
    first = {name: given.pop(name) for name in ("y", "streams", "post", "comb")}
    assert torch.equal(streams, mhc_post(**first))
    for got, want in zip(outputs, mhc_pre(streams=streams, **given), strict=True):
        assert torch.equal(got, want)
    if aux:
        assert_close(mean, streams.double().mean(1), OP.tolerances["aux"])
    else:
        assert mean.shape == (0, streams.shape[-1])


def test_oracle_in_float64_from_end_to_end():
    """All in float64 with no rounding between: what the bfloat16 steps are allowed to cost."""
    given = OP.cases[3].inputs(seed=2)
    streams, post, comb, layer_input, pre, _ = mhc_post_pre(**given)
    x = torch.einsum("tjk,tjd->tkd", given["comb"].double(), given["streams"].double())
    x = x + given["post"].double() * given["y"].double()[:, None]
    z = torch.nn.functional.linear(torch.nn.functional.rms_norm(x.flatten(1), (1024,), eps=1e-20), given["fn"].double())
    z = z * given["scale"].double().repeat_interleave(torch.tensor([4, 4, 16])) + given["base"].double()
    matrix = z[:, 8:].view(-1, 4, 4).softmax(-1)
    for _ in range(20):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        last, matrix = matrix, matrix / matrix.sum(-1, keepdim=True)
    u = torch.einsum("tj,tjd->td", given["pre_mix"].double(), x)
    u = torch.nn.functional.rms_norm(u, (256,), given["norm_weight"].double(), 1e-20)
    wants = {"streams": x, "post": 2 * torch.sigmoid(z[:, 4:8, None]), "comb": last}
    wants |= {"layer_input": u, "pre": torch.sigmoid(z[:, :4])}
    gots = {"streams": streams, "post": post, "comb": comb, "layer_input": layer_input, "pre": pre}
    for name, want in wants.items():
        assert (gots[name].double() - want).norm() <= 6e-3 * want.norm(), name


def test_same_bits_alone_and_in_a_batch():
    given = OP.cases[3].inputs(seed=3)
    whole = mhc_post_pre(**given)
    rows = ("y", "streams", "post", "comb", "pre_mix")
    for t in (0, 40, 62):
        for one, all_rows in zip(mhc_post_pre(**given | {n: given[n][t : t + 1] for n in rows}), whole):
            assert torch.equal(one[0], all_rows[t])


def test_contract():
    given = OP.cases[3].inputs()
    with pytest.raises(ContractError, match="fn has 256 columns, must have 1024"):
        mhc_post_pre(**given | {"fn": given["fn"][:, :256].contiguous()})
    with pytest.raises(ContractError, match="post has shape"):
        mhc_post_pre(**given | {"post": given["post"][..., 0]})
