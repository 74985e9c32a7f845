# SPDX-License-Identifier: Apache-2.0
"""`make search-pipeline`: twenty of its scenarios, and that it tells what it finds."""

import json
from itertools import chain
from threading import Event

import numpy as np
import pytest

from . import pipeline_search
from .pipeline_search import NAMED, Outcome, examine, main, search
from .random_scenarios import EDGES, LONGEST, NEW_TOKENS, random_scenario

SEARCHED = "drafts-5,3-async"
SCENARIOS = 20


@pytest.fixture(scope="module")
def outcome(session, tmp_path_factory):
    session.close()
    with session.timed(f"search {SEARCHED}"):
        folder = tmp_path_factory.mktemp("search")
        search([outcome := Outcome(SEARCHED, list(range(SCENARIOS)))], folder, lambda outcome: None)
    assert not outcome.broken, outcome.broken
    return outcome


@pytest.mark.vllm
def test_no_scenario_differs(outcome):
    assert outcome.found == [] and outcome.scenarios == SCENARIOS
    assert outcome.tokens > 100 and outcome.log_probabilities > 512 * outcome.tokens


@pytest.mark.vllm
def test_scenarios_do_what_they_are_for(outcome):
    """Several in flight, preemption, prompts from the prefix cache past a page, aborted requests, trimmed steps."""
    assert SCENARIOS > outcome.several > 5
    assert outcome.preempted and outcome.cached > 128 and outcome.aborted and outcome.trimmed


@pytest.mark.vllm
def test_spoiled_tensors_are_found(outcome):
    assert "hidden_states" in outcome.controls and None not in outcome.controls.values()


def test_scenarios_are_of_their_seed_and_reach_the_edges():
    drawn = [random_scenario(seed) for seed in range(500)]
    assert drawn == [random_scenario(seed) for seed in range(500)]
    assert 100 < sum(scenario.one_in_flight for scenario in drawn) < 300
    requests = [request for scenario in drawn for request in chain(*scenario.rounds)]
    lengths = [len(prompt) for prompt, *_ in requests]
    assert set(EDGES) <= set(lengths) and max(lengths) == LONGEST
    assert {own["sampling"]["max_tokens"] for *_, own in requests} == set(NEW_TOKENS)
    for chosen in ("temperature", "prompt_logprobs"):
        assert 0.1 < sum(chosen in own["sampling"] for *_, own in requests) / len(requests) < 0.5
    assert any(own["abort"] is not None for *_, own in requests)


class Scripted:
    """In place of an engine: each scenario samples token 1, but 2 where `wrong` holds for the first prompt's length."""

    def __init__(self, wrong=lambda length: False, notices=True):
        self.wrong, self.notices, self.spoiled = wrong, notices, None

    def events(self, kind):
        return []

    def call(self, method, argument=None):
        if method == "spoil":
            self.spoiled = argument
        if method in ("scenario", "replay"):
            length = argument["length"] if method == "replay" else len(argument[0][0])
            token = 2 if self.wrong(length) or (self.spoiled and self.notices) else 1
            worker = {"drafts": [], "sent": [{"hidden_states": (), "pre_mix": ()}]}
            return {"steps": [(["a"], [[token]], [np.array([[token]]), np.array([[-0.5]])])], "answers": [[token]],
                    "workers": [worker], "preempted": 0, "cached": 0, "length": length}


def outcome_of(staged: Scripted, told=lambda: None) -> Outcome:
    outcome = Outcome(SEARCHED, list(range(30)))
    examine(staged, Scripted(), outcome, told)
    return outcome


def test_a_difference_is_told_with_its_seed():
    told = []
    outcome = outcome_of(Scripted(wrong=lambda length: length > 300), lambda: told.append(1))
    wrong = [seed for seed in range(30) if any(len(first[0]) > 300 for first, *_ in random_scenario(seed).rounds)]
    assert 0 < len(wrong) < 30 and [found["seed"] for found in outcome.found] == wrong
    assert outcome.found[0]["in"][-1] == "tokens"
    assert outcome.found[0]["command"].endswith(f'SEARCH="--engine {SEARCHED} --seed {wrong[0]}"')
    assert outcome.scenarios == 30 and len(told) == 31 and not outcome.right


def test_a_spoiled_tensor_that_is_not_found_is_a_failure():
    assert outcome_of(Scripted()).controls == {"hidden_states": 1}
    unnoticed = outcome_of(Scripted(notices=False))
    assert unnoticed.controls == {"hidden_states": None} and not unnoticed.found and not unnoticed.right


def searching(scripted: Scripted, limit: int = 10**6):
    """In place of `search`: engines that answer as scripted, and are stopped after a number of scenarios."""

    def search(outcomes, folder, told, at_once):
        for outcome in outcomes:
            counted = 0

            def counting():
                nonlocal counted
                counted += 1
                told(outcome)
                if counted == limit:
                    raise KeyboardInterrupt

            examine(scripted, Scripted(), outcome, counting)

    return search


def figures_of(receipt: dict) -> dict:
    """By the last part of their ids, which name the engines unless all were searched."""
    (engines,) = {figure["id"].rpartition(".")[0] for figure in receipt["figures"]}
    assert engines == f"pipeline_search.{SEARCHED}"
    return {figure["id"].rpartition(".")[2]: figure["value"] for figure in receipt["figures"]}


@pytest.mark.parametrize("staged, status", [(Scripted(), 0), (Scripted(wrong=lambda length: True), 1)])
def test_receipt(tmp_path, monkeypatch, capsys, staged, status):
    monkeypatch.setattr(pipeline_search, "search", searching(staged))
    written = tmp_path / "receipt.json"
    asked = ["--receipt", str(written), "--folder", str(tmp_path), "--engine", SEARCHED, "--scenarios", "30"]
    assert main(asked) == status
    receipt = json.loads(written.read_text())
    figures = figures_of(receipt)
    assert (figures["scenarios"], figures["differences"], figures["wrong"]) == (30, 30 * status, status)
    assert receipt["correctness"] == f"{1 - status} of {1 - status} spoiled tensors were found"
    assert receipt["kind"] == "search-pipeline" and receipt["samples"]["engines"][0]["seeds"] == list(range(30))
    assert ("make search-pipeline SEARCH=" in capsys.readouterr().out) == bool(status)


def test_a_search_that_was_stopped_goes_on(tmp_path, monkeypatch):
    """Every scenario is run once, and the receipt is that of a search that was not stopped."""
    whole, halves = tmp_path / "whole.json", tmp_path / "halves.json"
    asked = ["--folder", str(tmp_path), "--engine", SEARCHED, "--scenarios", "30", "--receipt"]
    monkeypatch.setattr(pipeline_search, "search", searching(Scripted()))
    assert main([*asked, str(whole)]) == 0
    monkeypatch.setattr(pipeline_search, "search", searching(Scripted(), limit=11))
    with pytest.raises(KeyboardInterrupt):
        main([*asked, str(halves)])
    stopped = figures_of(json.loads(halves.read_text()))
    assert (stopped["scenarios"], stopped["wrong"]) == (11, 1)
    monkeypatch.setattr(pipeline_search, "search", searching(Scripted()))
    assert main(["--resume", "--receipt", str(halves), "--folder", str(tmp_path)]) == 0
    both = [json.loads(path.read_text()) for path in (whole, halves)]
    assert both[0]["samples"] == both[1]["samples"] and both[0]["figures"] == both[1]["figures"]
    with pytest.raises(SystemExit, match="commit 0123.*\nhint:"):
        halves.write_text(json.dumps(both[1] | {"commit": "0123"}))
        main(["--resume", "--receipt", str(halves), "--folder", str(tmp_path)])


def test_engines_are_shared_out_by_group(tmp_path, monkeypatch):
    """Each outcome once, with others of its group, at most six to an engine without stages; none that is done."""
    shares = []
    monkeypatch.setattr(pipeline_search, "_search_share", lambda share, folder, told: shares.append(share))
    outcomes = [Outcome(name, []) for name in NAMED]
    outcomes[0].controls = {"hidden_states": 1}
    search(outcomes, tmp_path, lambda outcome: None, at_once=2)
    assert sorted(outcome.engine for share in shares for outcome in share) == sorted([*NAMED][1:])
    assert all(len({NAMED[outcome.engine].group for outcome in share}) == 1 for share in shares)
    assert max(map(len, shares)) <= 6 and len(shares) == 5


def test_threads_stop_with_the_first_that_fails(tmp_path, monkeypatch):
    """The other ends after the scenario it is in, and no share is begun."""
    begun, ended = [], []
    failing = Event()

    def share(members, folder, told):
        begun.append(members[0].engine)
        if len(begun) == 1:
            failing.wait(60)
            raise ZeroDivisionError
        failing.set()
        while not ended:
            try:
                told(members[0])
            except pipeline_search.Stopped:
                ended.append(members[0].engine)

    monkeypatch.setattr(pipeline_search, "_search_share", share)
    with pytest.raises(ZeroDivisionError):
        search([Outcome(name, []) for name in NAMED], tmp_path, lambda outcome: None, at_once=2)
    assert len(begun) == 2 and ended == begun[1:]
