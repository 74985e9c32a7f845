# SPDX-License-Identifier: Apache-2.0
"""Properties of the attention over gathered rows that its cases do not reach, in small."""

import pytest
import torch

from vllm.ampere import arch
from vllm.ampere.kernels.attention.sparse_mla_rows import OP
from vllm.ampere.kernels.registry import Case
from vllm.ampere.testing import ptx_launch
from vllm.ampere.testing.compare import assert_close
from vllm.ampere.testing.parity import produce


@pytest.fixture(params=[(i, name) for i in OP.implementations for name in i.architectures], ids=lambda p: f"{p[0].name}-{p[1]}")
def attend(request):
    """Each implementation, for each architecture."""
    implementation, architecture = request.param
    with ptx_launch.on_the_cpu(arch.ARCHITECTURES[architecture]):
        yield implementation.function


def given(device, tokens=3, heads=8, rows=90, width=70, seed=3):
    return Case("", {"T": tokens, "H": heads, "N": rows, "L": width}, OP.cases[0].make).inputs(seed, device)


@pytest.mark.parametrize("sink", [0.0, 30.0, -torch.inf])
def test_no_row_gives_zeros(device, attend, sink):
    inputs = given(device)
    inputs["sink"].fill_(sink)
    inputs["lens"][:] = torch.tensor([0, 70, -1])
    inputs["indices"][1] = -1
    assert not attend(**inputs).any()


def test_lengths_past_the_list(device, attend):
    inputs = given(device)
    inputs["rows"].nan_to_num_()
    inputs["lens"][:] = torch.tensor([1000, 70, 1])
    got = produce(OP, attend, inputs)["o"]
    assert_close(got, OP.reference(**inputs), OP.tolerances["o"])
    assert torch.equal(got[1:], produce(OP, attend, inputs | {"lens": inputs["lens"].clamp_max(70)})["o"][1:])


def test_a_nan_reaches_its_own_token_only(device, attend):
    inputs = given(device, tokens=2, width=4)
    inputs["rows"].nan_to_num_()
    inputs["lens"].fill_(4)
    inputs["indices"] = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.int32, device=device)
    clean = attend(**inputs)
    inputs["rows"][2, 7] = torch.nan
    got = attend(**inputs)
    assert got[0].isnan().all() and torch.equal(got[1], clean[1])


@pytest.mark.parametrize("heads", [1, 16, 24, 64])
def test_heads_and_strided_queries(device, attend, heads):
    """Heads that fill no tile, and queries and results that are slices of wider ones."""
    inputs = given(device, heads=heads)
    wide = torch.full((3, heads + 3, 512), torch.nan, dtype=torch.bfloat16, device=device)
    out = wide.clone()
    wide[:, 2 : heads + 2] = inputs["q"]
    got = attend(**(inputs | {"q": wide[:, 2 : heads + 2]}), out=out[:, 1 : heads + 1])
    assert_close(got, OP.reference(**inputs), OP.tolerances["o"], f"{heads} heads")
    assert out[:, 0].isnan().all() and out[:, heads + 1 :].isnan().all()
