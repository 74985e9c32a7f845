# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on a checkpoint whose drafts often agree: same answers, and the same caches byte for byte."""

import json
from pathlib import Path

import pytest
import torch

from vllm.ampere.testing.engine import OPTIONS, run

from .scenarios import DRAFTS, alone, drafted, prompt

pytestmark = pytest.mark.vllm
NEW_TOKENS = 24


@pytest.mark.parametrize("length", (20, 700))
def test_log_probabilities(session, length):
    session.assert_agrees("dspark", f"{length} tokens", prompt(length), session.measure("dspark", alone, length))


def test_greedy_output_does_not_change(session):
    plain, drafts, accepted = session.measure("agreeing", drafted)
    assert (drafts, accepted) == (0, 0)
    speculative, drafts, accepted = session.measure("dspark", drafted)
    assert speculative == plain
    assert drafts < sum(map(len, speculative)) / 2, "less than one draft accepted a step"
    assert accepted > drafts


@pytest.fixture(scope="module")
def snapshots(session, tmp_path_factory):
    """Steps of `cache_snapshots.py` without and with drafts."""
    folder = tmp_path_factory.mktemp("caches")
    found = []
    for name, extra in (("plain", {}), ("speculative", {"speculative_config": DRAFTS})):
        job = {"checkpoint": str(session.checkpoint("parrot")), "options": OPTIONS | extra, "max_tokens": NEW_TOKENS,
               "prompts": [prompt(length, 6) for length in (20, 45, 150)], "output": str(folder / f"{name}.pt")}
        with session.timed(f"caches: {name}"):
            ended = run([str(Path(__file__).with_name("cache_snapshots.py")), json.dumps(job)], folder / f"{name}.log", 400)
        assert ended.code == 0, ended.output[-4000:]
        found.append(torch.load(job["output"]))
    return found


def by_length(steps):
    """(request, tokens whose rows stand) -> its snapshot."""
    return {(number, seen["computed"]): seen for step in steps for number, seen in step.items()}


def partial_acceptances(steps):
    """(request, tokens whose rows stand) after every step that accepted some of its 5 drafts, but not all."""
    found, before = [], {}
    for step in steps:
        for number, seen in step.items():
            if number in before and 1 < seen["computed"] - before[number] < 1 + DRAFTS["num_speculative_tokens"]:
                found.append((number, seen["computed"]))
            before[number] = seen["computed"]
    return found


def test_caches_after_partial_acceptance(snapshots):
    """Window, compressed rows, index keys and the compressor's ring hold the bytes that plain decoding put there."""
    plain, speculative = map(by_length, snapshots)
    compared = [at for at in partial_acceptances(snapshots[1]) if at in plain]
    assert len({number for number, _ in compared}) == 3, compared
    for at in compared:
        assert speculative[at]["tokens"] == plain[at]["tokens"]
        assert speculative[at]["rows"].keys() == plain[at]["rows"].keys()
        for name, rows in plain[at]["rows"].items():
            assert torch.equal(speculative[at]["rows"][name], rows), f"{name} of request {at[0]} at {at[1]} tokens"


def test_rejected_rows_differ(snapshots):
    """The row after the accepted ones is a rejected draft's, unlike plain decoding's: one row too many is noticed."""
    plain, speculative = map(by_length, snapshots)
    compared = [(n, at) for n, at in partial_acceptances(snapshots[1]) if (n, at) in plain and (n, at + 1) in plain]
    assert compared
    for number, at in compared:
        rejected, right = speculative[number, at]["rejected"], plain[number, at + 1]["rows"]
        assert rejected
        assert all(not torch.equal(row, right[name][-1]) for name, row in rejected.items())
