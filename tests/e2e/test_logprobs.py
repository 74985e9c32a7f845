# SPDX-License-Identifier: Apache-2.0
"""One process over HTTP against the reference decoder: lengths, chunks, batches, prefix cache, prompt log-probs."""

import pytest
import torch

from vllm.ampere.testing.reference_controls import CONTROLS

from .scenarios import LENGTHS, RMS_BOUND, agreement, alone, prompt, prompt_logprobs, together, warm

pytestmark = pytest.mark.vllm
# Rules of which a wrong one would still answer fluently.
BROKEN = ("no_engram", "no_sink", "no_selection", "fewer_selected", "no_candidates", "shorter_window", "no_cache_rounding")


@pytest.mark.parametrize("length", LENGTHS)
def test_generated_tokens(session, length):
    """20 tokens see one window, 100 pass top-k at ratio 1, 700 also top-k at ratio 2, the candidates and a chunk's end."""
    answer = session.measure("plain", alone, length)
    assert answer.cached_tokens == 0
    session.assert_agrees("plain", f"{length} tokens", prompt(length), answer)


@pytest.mark.parametrize("narrow", [{"top_p": 1e-6}, {"top_k": 1}, {"top_k": 50, "top_p": 1e-6}], ids=str)
def test_sampling_narrowed_to_one_token_takes_the_likeliest(session, narrow):
    """Or one as likely: bfloat16 logits tie."""
    body = {"model": str(session.checkpoint("sharp")), "prompt": prompt(20), "max_tokens": 8, "ignore_eos": True,
            "temperature": 1.0, "logprobs": 2, **narrow}
    status, answer = session.server("plain").post("/v1/completions", body)
    assert status == 200, answer
    shown = answer["choices"][0]["logprobs"]
    assert shown["token_logprobs"] == [max(likeliest.values()) for likeliest in shown["top_logprobs"]]
    assert len(shown["token_logprobs"]) == 8


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule_is_noticed(session, name):
    """The same answers against a reference with one rule broken: past the bound at one length or more."""
    broken = session.decoder("plain", CONTROLS[name])
    seen = []
    for length in LENGTHS:
        answer = session.measure("plain", alone, length)
        with session.timed("negative controls"):
            seen.append(agreement(broken, prompt(length), answer).rms)
        session.figures[f"{name}: {length} tokens"] = seen[-1]
    assert max(seen) > RMS_BOUND, seen


def test_cold_prefill_is_trimmed(session):
    """A step of 512 prompt tokens runs the layers past the last KV source on its last 128 rows only."""
    session.measure("plain", alone, 700)
    trims = session.server("plain").events("replay_trim")
    assert any((event["rows"], event["kept"]) == (512, 128) for event in trims)


def test_prefix_cache_and_replay(session):
    """The cache serves 5 pages of 128 tokens to each answer, and the replay of their windows leaves rows out."""
    seen = session.measure("plain", warm)
    for given, answer in seen.answers:
        assert answer.cached_tokens == 640
        session.assert_agrees("plain", f"{len(given)} tokens, 640 of them cached", given, answer)
    # With bounded replay one group, that of the compressed rows, is shared and decides alone.
    assert seen.hits == seen.group_hits == 2 * 640
    assert sum(event["rows"] - event["kept"] for event in seen.trims) > 0


def test_prompt_logprobs_bypass_cache_and_replay(session):
    """They need every row, so such a request neither reads the prefix cache nor leaves rows out."""
    session.measure("plain", alone, 700)
    trims = len(session.server("plain").events("replay_trim"))
    answer = session.server("plain").complete(prompt(700), 1, logprobs=False, prompt_logprobs=True)
    assert answer.cached_tokens == 0
    assert len(session.server("plain").events("replay_trim")) == trims
    assert len(answer.prompt_logprobs) == 699


def prompt_rms(decoder, given, answer) -> float:
    """Without the worst token in a hundred: a near tie in a selection falls as the processor's sums do, and moves its own."""
    want = decoder.logits(given)[:-1].log_softmax(-1).gather(1, torch.tensor(given[1:])[:, None])[:, 0]
    off = (answer.prompt_logprobs - want).abs().sort().values
    return off[: len(off) - len(off) // 100].square().mean().sqrt().item()


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_logprobs(session, length):
    """And the broken rule that is nearest to the right one is noticed."""
    answer, given = session.measure("no-replay", prompt_logprobs, length), prompt(length, 4)
    rms = prompt_rms(session.decoder("no-replay"), given, answer)
    session.figures[f"no-replay: prompt of {length} tokens"] = rms
    assert rms < RMS_BOUND
    if length == max(LENGTHS):
        assert prompt_rms(session.decoder("no-replay", CONTROLS["no_cache_rounding"]), given, answer) > RMS_BOUND


def test_two_requests_at_once(session):
    for given, answer in session.measure("no-replay", together):
        session.assert_agrees("no-replay", f"{len(given)} tokens, two at once", given, answer)
