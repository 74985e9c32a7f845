# SPDX-License-Identifier: Apache-2.0
"""The runs of this session, and the reference decoder on the card."""

import importlib.util

import pytest
import torch

from tests.e2e.replay import engine_logits, replaying
from vllm.ampere.testing.reference_decoder import ReferenceDecoder

from .reference import decoder_of
from .runs import OPTIONS, RUNS, Runner, obstacle

RUNS_OF = pytest.StashKey["Runs"]()
FIGURES = pytest.StashKey[dict]()


def pytest_collection_modifyitems(items):
    """Skip what this machine cannot run. The tests of this folder come last, since their engines start with the session,
    and the one that wants the machine for itself behind them."""
    here = [item for item in items if item.path.parent.name == "engine"]
    items.sort(key=lambda item: (item in here, item.path.name == "test_serve.py"))
    missing = "" if importlib.util.find_spec("vllm.v1") else "vLLM is not installed in this Python"
    for item in here:
        reasons = [missing or obstacle(RUNS[name].mode) for name in needed(item)] or [missing]
        if any(reasons):
            item.add_marker(pytest.mark.skip(reason=next(filter(None, reasons))))


def pytest_collection_finish(session):
    wanted = [name for item in session.items if not item.get_closest_marker("skip") for name in needed(item)]
    if wanted and not session.config.option.collectonly:
        runner = Runner(session.config._tmp_path_factory.mktemp("engines"))
        session.config.stash[RUNS_OF] = Runs(runner, session.config.stash.setdefault(FIGURES, {}))
        runner.start(dict.fromkeys(wanted))


def needed(item) -> list[str]:
    """Names of the runs that a test reads: those of its marker `reads`, and its parameter `name`."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return [name for mark in item.iter_markers("reads") for name in mark.args] + [v for k, v in parameters.items() if k == "name"]


class Runs:
    """What the tests ask: results of runs, and the reference's answer to the same tokens.

    Attributes:
        figures: label -> what a comparison gave; printed at the end.
    """

    def __init__(self, runner: Runner, figures: dict):
        self.runner, self.figures = runner, figures

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def answers(self, name: str, step: str) -> list[dict]:
        return self.runner.result(name)["answers"][step]

    def reference(self, name: str, given: list[int], answer: dict) -> torch.Tensor:
        """float32 [generated tokens, vocabulary] of log-probabilities, for one request that ran alone in run `name`."""
        run = RUNS[name]
        with torch.device("cuda"):
            decoder = self._decoder(run.checkpoint)
            if run.options.get("swa_bounded_replay", True):
                decoder = replaying(decoder)
            logits = engine_logits(decoder, given, answer["tokens"], answer["cached_tokens"], OPTIONS["max_num_batched_tokens"])
        return logits.log_softmax(-1).cpu()

    def whole(self, checkpoint: str, given: list[int]) -> torch.Tensor:
        """float32 [tokens - 1, vocabulary]: log-probabilities of each token after the first, no replay."""
        with torch.device("cuda"):
            return self._decoder(checkpoint).logits(given)[:-1].log_softmax(-1).cpu()

    def _decoder(self, checkpoint: str) -> ReferenceDecoder:
        return decoder_of(self.runner.checkpoint(checkpoint))


@pytest.fixture(scope="session")
def runs(request):
    return request.config.stash[RUNS_OF]


@pytest.fixture(scope="session")
def figures(request) -> dict:
    """Label -> what a comparison gave; printed at the end."""
    return request.config.stash.setdefault(FIGURES, {})


def pytest_terminal_summary(terminalreporter, config):
    if config.stash.get(FIGURES, None):
        terminalreporter.section("engines: figures")
        for label, value in config.stash[FIGURES].items():
            terminalreporter.write_line(f"{label}: {value}")
