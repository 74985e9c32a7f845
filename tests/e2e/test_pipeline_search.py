# SPDX-License-Identifier: Apache-2.0
"""`make search-pipeline`: twenty of its scenarios, and that it tells what it finds."""

import json
from itertools import chain

import numpy as np
import pytest

from . import pipeline_search
from .pipeline_search import LAYOUTS, Outcome, examine, main, search
from .random_scenarios import EDGES, LONGEST, NEW_TOKENS, random_scenario

(SEARCHED,) = (layout for layout in LAYOUTS if str(layout) == "drafts-5,3-async")
SCENARIOS = 20


@pytest.fixture(scope="module")
def outcome(session, tmp_path_factory):
    session.close()
    with session.timed(f"search {SEARCHED}"):
        folder = tmp_path_factory.mktemp("search")
        (outcome,) = search([SEARCHED], lambda number: list(range(SCENARIOS)), folder, lambda outcomes: None)
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
    outcome = Outcome(str(SEARCHED), list(range(30)))
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


@pytest.mark.parametrize("staged, status", [(Scripted(), 0), (Scripted(wrong=lambda length: True), 1)])
def test_receipt(tmp_path, monkeypatch, capsys, staged, status):
    def scripted_search(layouts, seeds, folder, told):
        outcomes = [outcome_of(staged)]
        told(outcomes)
        return outcomes

    monkeypatch.setattr(pipeline_search, "search", scripted_search)
    written = tmp_path / "receipt.json"
    asked = ["--receipt", str(written), "--folder", str(tmp_path), "--engine", str(SEARCHED), "--scenarios", "30"]
    assert main(asked) == status
    receipt = json.loads(written.read_text())
    figures = {figure["id"].split(".")[1]: figure["value"] for figure in receipt["figures"]}
    assert (figures["scenarios"], figures["differences"], figures["wrong"]) == (30, 30 * status, status)
    assert receipt["correctness"] == f"{1 - status} of {1 - status} spoiled tensors were found"
    assert receipt["kind"] == "search-pipeline" and receipt["samples"]["engines"][0]["seeds"] == list(range(30))
    assert ("make search-pipeline SEARCH=" in capsys.readouterr().out) == bool(status)
