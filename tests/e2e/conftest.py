# SPDX-License-Identifier: Apache-2.0
"""One running server at a time, measurements taken once a session, and the table of what they cost.

A measurement is a scenario run on a configuration. Tests of one configuration share its server, and tests that
compare two configurations start neither again if both were measured before.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.tables import TABLES, add
from tokenizers import Tokenizer

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import Completion, Server
from vllm.ampere.testing.reference_decoder import ReferenceDecoder
from vllm.ampere.testing.reference_rounding import ENGINE
from vllm.ampere.testing.reference_weights import load_weights
from vllm.ampere.testing.token_classes import token_classes

from .replay import replaying
from .scenarios import CONFIGURATIONS, RMS_BOUND, Agreement, agreement


class Session:
    """Checkpoints, decoders and measurements; at most one server runs.

    Attributes:
        seconds: what took how long.
        figures: rms of each comparison with the reference.
    """

    def __init__(self, folder: Path):
        self._folder, self._server, self._running = folder, None, ""
        self._measured, self._parts, self._broken = {}, {}, {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.figures: dict[str, float] = {}

    def checkpoint(self, preset: str) -> Path:
        return tiny_checkpoint.write(self._folder / preset, preset)

    def decoder(self, name: str, make: Callable[..., ReferenceDecoder] = ReferenceDecoder) -> ReferenceDecoder:
        """A decoder with the engine's roundings, of a configuration's checkpoint, that replays if the engine does."""
        preset = CONFIGURATIONS[name].preset
        if preset not in self._parts:
            path = self.checkpoint(preset)
            spec = ModelSpec.from_config(json.loads((path / "config.json").read_text()))
            classes = token_classes(Tokenizer.from_file(str(path / "tokenizer.json")))
            self._parts[preset] = spec, load_weights(path, spec), classes
        decoder = make(*self._parts[preset], ENGINE)
        return replaying(decoder) if CONFIGURATIONS[name].replays else decoder

    def server(self, name: str) -> Server:
        """The running server of a configuration; another one is stopped first."""
        if name in self._broken:
            pytest.fail(f"the server {name} did not start before: {self._broken[name]}", pytrace=False)
        if self._running != name:
            self.close()
            configuration = CONFIGURATIONS[name]
            folder = self._folder / f"server-{name}"
            folder.mkdir(exist_ok=True)
            options = {"enable_prompt_tokens_details": True, **configuration.options}
            server = Server(self.checkpoint(configuration.preset), folder, options, configuration.env)
            try:
                self._server, self._running = server.__enter__(), name
            except RuntimeError as error:
                self._broken[name] = str(error)
                raise
            self.seconds[f"{name}: start"] += server.startup_s
        return self._server

    def close(self) -> None:
        if self._server:
            self._server.__exit__(None, None, None)
        self._server, self._running = None, ""

    def measure(self, name: str, scenario, *args):
        """`scenario(server, *args)` on a configuration, run once a session."""
        key = (name, scenario.__name__, *args)
        if key not in self._measured:
            server = self.server(name)
            with self.timed(f"{name}: {scenario.__name__}"):
                self._measured[key] = scenario(server, *args)
        return self._measured[key]

    def assert_agrees(self, name: str, label: str, given: list[int], answer: Completion) -> Agreement:
        """The answer is greedy and complete, within the bound, and its tokens are the reference's but for near ties."""
        with self.timed("reference decoder"):
            seen = agreement(self.decoder(name), given, answer)
        self.figures[f"{name}: {label}"] = seen.rms
        assert len(answer.tokens) == 8 and answer.tokens == answer.logprobs.argmax(-1).tolist()
        assert seen.rms < RMS_BOUND, f"rms {seen.rms:.4f}, per token {[round(v, 3) for v in seen.per_token]}"
        assert seen.worst_margin <= 4 * seen.rms, f"a token that the reference ranks {seen.worst_margin:.3f} below its own"
        return seen

    def timed(self, label: str):
        return Timer(self.seconds, label)


class Timer:
    """Adds the seconds of a `with` block to an entry of a table."""

    def __init__(self, table: dict[str, float], label: str):
        self._table, self._label = table, label

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_) -> None:
        self._table[self._label] += time.monotonic() - self._start


@pytest.fixture(scope="session")
def session(tmp_path_factory, request):
    session = Session(tmp_path_factory.mktemp("e2e"))
    yield session
    session.close()
    seconds = {**session.seconds, "sum": sum(session.seconds.values())}
    add(request.config.stash[TABLES], {
        "end to end: seconds": seconds, "end to end: rms against the reference decoder": session.figures,
    })
