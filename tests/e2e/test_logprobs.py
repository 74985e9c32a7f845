# SPDX-License-Identifier: Apache-2.0
"""One process over HTTP against the reference decoder: lengths, chunks, batches, prefix cache, prompt log-probs."""

import math
from dataclasses import replace

import pytest
import torch

from vllm.ampere.testing.reference_decoder import ReferenceDecoder
from vllm.ampere.testing.reference_rounding import ENGINE, exact

from .scenarios import LENGTHS, RMS_BOUND, agreement, alone, prompt, prompt_logprobs, together, warm

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("length", LENGTHS)
def test_generated_tokens(session, length):
    """20 tokens see one window, 100 pass top-k at ratio 1, 700 also top-k at ratio 2, the candidates and a chunk's end."""
    answer = session.measure("plain", alone, length)
    session.assert_agrees("plain", f"{length} tokens", prompt(length), answer)
    assert answer.cached_tokens == 0


def test_two_requests_at_once(session):
    for given, answer in session.measure("plain", together):
        session.assert_agrees("plain", f"{len(given)} tokens, two at once", given, answer)


def test_prefix_cache_and_replay(session):
    """The cache serves 5 pages of 128 tokens to each answer, and the replay of their windows leaves rows out."""
    seen = session.measure("plain", warm)
    for given, answer in seen.answers:
        session.assert_agrees("plain", f"{len(given)} tokens, 640 of them cached", given, answer)
        assert answer.cached_tokens == 640
    assert seen.hits == 2 * 640
    assert sum(event["rows"] - event["kept"] for event in seen.trims) > 0


def test_cold_prefill_is_trimmed(session):
    """A step of 512 prompt tokens runs the layers past the last KV source on its last 128 rows only."""
    session.measure("plain", alone, 700)
    assert any(event["rows"] - event["kept"] >= 512 - 128 for event in session.server("plain").events("replay_trim"))


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_logprobs(session, length):
    """They need every row, so that request neither reads the prefix cache nor leaves rows out."""
    trims = len(session.server("plain").events("replay_trim"))
    answer = session.measure("plain", prompt_logprobs, length)
    given = prompt(length, 4)
    want = session.decoder("sharp").logits(given)[:-1].log_softmax(-1).gather(1, torch.tensor(given[1:])[:, None])[:, 0]
    rms = (answer.prompt_logprobs - want).square().mean().sqrt().item()
    session.figures[f"plain: prompt of {length} tokens"] = rms
    assert rms < RMS_BOUND
    assert answer.cached_tokens == 0
    assert len(session.server("plain").events("replay_trim")) == trims


# ------------------------------------------------------------------ negative controls


class NoCacheRounding(ReferenceDecoder):
    def __init__(self, spec, weights, classes, rounding):
        super().__init__(spec, weights, classes, replace(rounding, window=exact, compressed=exact, index=exact))


class NoSink(ReferenceDecoder):
    def sink(self, p):
        return torch.full_like(super().sink(p), -math.inf)


class NoEngram(ReferenceDecoder):
    def engram(self, layer, x, chunk):
        return x


def changed(**numbers):
    return {"edit": lambda spec, weights: (replace(spec, **numbers), weights)}


CONTROLS = {
    "no engram": {"kind": NoEngram},
    "no sink": {"kind": NoSink},
    "no top-k selection": changed(index_topk=10**6),
    "top-k 48 instead of 64": changed(index_topk=48),
    "no candidate mask": changed(candidate_source_layer_id=-1),
    "window of 127": changed(sliding_window=127),
    "no cache rounding": {"kind": NoCacheRounding},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_broken_rule_is_noticed(session, name):
    """The same answers against a reference with one rule broken: past the bound at one length or more."""
    broken = session.decoder("sharp", **CONTROLS[name])
    seen = {}
    for length in LENGTHS:
        answer = session.measure("plain", alone, length)
        with session.timed("negative controls"):
            seen[length] = agreement(broken, prompt(length), answer).rms
        session.figures[f"control, {name}: {length} tokens"] = seen[length]
    assert max(seen.values()) > RMS_BOUND, seen
