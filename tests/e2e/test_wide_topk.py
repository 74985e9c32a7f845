# SPDX-License-Identifier: Apache-2.0
"""The released top-k of 512 rows."""

import pytest

from .scenarios import alone, prompt

pytestmark = pytest.mark.vllm


def test_past_top_k_and_candidates(session):
    """1200 tokens: 600 and 1200 compressed rows, of which 512 are selected, the latter inside 128 blocks of 8."""
    session.assert_agrees("wide-topk", "1200 tokens", prompt(1200), session.measure("wide-topk", alone, 1200))
