# SPDX-License-Identifier: Apache-2.0
"""Two processes over gloo: tensor parallel against the reference, pipeline stages bit by bit against one process."""

import pytest
import torch

from .scenarios import LENGTHS, alone, drafted, prompt, warm

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("length", LENGTHS)
def test_tensor_parallel(session, length):
    session.assert_agrees("tp2", f"{length} tokens", prompt(length), session.measure("tp2", alone, length))


def test_ranks_draft_from_shards_of_the_vocabulary(session):
    """Each rank samples from its half of the tokens: drafts are accepted as one rank's are, and answers are right."""
    answer = session.measure("dspark-tp2", alone, 20)
    session.assert_agrees("dspark-tp2", "20 tokens", prompt(20), answer)
    _, drafts, accepted = session.measure("dspark-tp2", drafted)
    assert accepted > drafts > 0


@pytest.mark.parametrize("length", LENGTHS)
def test_pipeline_starts_at_last_source(session, length):
    """Stages of 4 and 4 layers: the second starts at the last KV source, whose replay batch it prepares itself."""
    split, whole = session.measure("pp2", alone, length), session.measure("plain", alone, length)
    session.assert_agrees("pp2", f"{length} tokens", prompt(length), split)
    assert split.tokens == whole.tokens
    assert torch.equal(split.logprobs, whole.logprobs)


def test_pipeline_with_prefix_cache_and_replay(session):
    split, whole = session.measure("pp2", warm), session.measure("plain", warm)
    for (given, answer), (_, same) in zip(split.answers, whole.answers):
        session.assert_agrees("pp2", f"{len(given)} tokens, 640 of them cached", given, answer)
        assert answer.tokens == same.tokens
        assert torch.equal(answer.logprobs, same.logprobs)
    assert split.hits == 2 * 640
    assert sum(event["rows"] - event["kept"] for event in split.trims) > 0
