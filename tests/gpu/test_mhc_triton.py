# SPDX-License-Identifier: Apache-2.0
"""The Triton boundary of hyper-connections on the card: what is checked of compiled kernels on the CPU too, and the model's sizes."""

import pytest
import torch

from tests.compiled.test_mhc import *  # noqa: F403
from tests.compiled.test_mhc import boundary
from vllm.ampere.kernels.mhc.mhc_post_pre import OP, mhc_post_pre
from vllm.ampere.kernels.mhc.reference import mhc_post_ref
from vllm.ampere.testing.parity import assert_parity, assert_same_bits, produce

pytestmark = pytest.mark.gpu


def moved_to_card(given):
    return {n: t.cuda() if isinstance(t, torch.Tensor) else t for n, t in given.items()}


@pytest.mark.parametrize("tokens", [1, 6, 12, 32, 33, 256, 257, 1025, 4097, 16_384])
def test_boundary_at_the_models_size(tokens):
    """The second run finds its results and partials filled with NaN."""
    given = moved_to_card(boundary(tokens, tokens, dim=5120))
    got = produce(OP, mhc_post_pre, given)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_same_bits(produce(OP, mhc_post_pre, given), got)
    finally:
        torch.use_deterministic_algorithms(False)
    streams = mhc_post_ref(given["y"], given["streams"], given["post"], given["comb"])
    assert_same_bits({"streams": got["streams"]}, {"streams": streams})
    assert_parity(OP, got, produce(OP, OP.reference, given))
