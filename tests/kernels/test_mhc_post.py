# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.kernels.mhc.mhc_post import MHC_COLLAPSE, MHC_POST, mhc_collapse, mhc_post
from vllm.ampere.testing.compare import assert_close


@pytest.mark.parametrize("case", MHC_POST.cases, ids=lambda c: c.name)
def test_post_oracle(case):
    given = case.inputs(seed=1)
    comb, streams = given["comb"].double(), given["streams"].double()
    want = torch.bmm(comb.transpose(1, 2), streams) + given["post"].double() * given["y"].double()[:, None]
    assert_close(mhc_post(**given), want, MHC_POST.tolerances["streams"])


@pytest.mark.parametrize("case", MHC_COLLAPSE.cases, ids=lambda c: c.name)
def test_collapse_oracle(case):
    given = case.inputs(seed=2)
    want = torch.bmm(given["mix"].double()[:, None], given["streams"].double())[:, 0]
    assert_close(mhc_collapse(**given), want, MHC_COLLAPSE.tolerances["collapsed"])


def test_comb_rows_are_sources():
    """A transposed comb moves the streams the other way."""
    streams = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    streams[0, 1] = 1.0
    comb = torch.zeros(1, 4, 4)
    comb[0, 1, 3] = 1.0
    got = mhc_post(torch.zeros(1, 8, dtype=torch.bfloat16), streams, torch.zeros(1, 4, 1), comb)
    assert got[0].float().sum(1).tolist() == [0, 0, 0, 8]


def test_identity_keeps_the_streams_and_a_unit_mix_takes_one():
    given = MHC_POST.cases[2].inputs(seed=3)
    identity = torch.eye(4).expand(63, 4, 4).contiguous()
    given |= {"comb": identity, "post": torch.zeros(63, 4, 1)}
    assert torch.equal(mhc_post(**given), given["streams"])
    unit = torch.tensor([0.0, 0, 1, 0]).expand(63, 4).contiguous()
    assert torch.equal(mhc_collapse(given["streams"], unit), given["streams"][:, 2])


def test_same_bits_alone_and_in_a_batch_and_for_strided_streams():
    given = MHC_POST.cases[2].inputs(seed=4)
    whole = mhc_post(**given)
    for t in (0, 31, 62):
        assert torch.equal(mhc_post(**{n: v[t : t + 1] for n, v in given.items()})[0], whole[t])
    wide = torch.full((63, 4, 400), torch.nan, dtype=torch.bfloat16)
    wide[..., 50:306] = given["streams"]
    assert torch.equal(mhc_post(**given | {"streams": wide[..., 50:306]}), whole)
    mix = given["post"].flatten(1)
    assert torch.equal(mhc_collapse(wide[..., 50:306], mix)[7:8], mhc_collapse(given["streams"][7:8], mix[7:8]))
