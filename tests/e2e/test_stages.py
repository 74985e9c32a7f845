# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages with DSpark, engram and bounded replay: bit by bit the engine of one process.

The draft reads the inputs of layers 1, 2, 4 and 6. So at a cut before layer 1, 2 or 4 one of them is taken on the cut,
and others before and after it. One request in flight is held against one process that schedules for itself. Several
are batched in another order over stages, so they are held against one process that executes the same scheduler outputs.
"""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.pipeline import crossing_bytes
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import OPTIONS, run

from . import staged_engine
from .scenarios import DRAFTS, prompt
from .stage_recorder import digest

pytestmark = pytest.mark.vllm
TAPS = (1, 2, 4, 6)
HIDDEN, STREAMS = 256, 4
OPTIONS = OPTIONS | {"speculative_config": DRAFTS, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1000}
# One short; one past top-k, candidates and a chunk's end; the same from the prefix cache; three of which one arrives late.
SCENARIOS = {
    "20": [[prompt(20, 7), 0]],
    "400": [[prompt(400, 7), 0]],
    "warm": [[prompt(400, 7), 0]],
    "several": [[prompt(330, 8), 0], [prompt(90, 8), 0], [prompt(30, 8), 3]],
}
ALONE = ("20", "400", "warm")
LIMIT_S = 600


@dataclass(frozen=True)
class Layout:
    """Layers of each stage, whether scheduling is asynchronous, and ranks of the tensor group."""

    partition: tuple[int, ...]
    asynchronous: bool
    tensor: int = 1

    def __str__(self):
        name = f"{','.join(map(str, self.partition))}-{'async' if self.asynchronous else 'sync'}"
        return name if self.tensor == 1 else f"tp{self.tensor}-{name}"

    @property
    def starts(self) -> list[int]:
        return [sum(self.partition[:stage]) for stage in range(len(self.partition))]


# The second stage starts at the last KV source (20,20 of the release), at the first, or after one window layer.
SHORT = (Layout((4, 4), True), Layout((4, 4), False), Layout((2, 6), False), Layout((1, 7), True))
LONG = (Layout((2, 6), True), Layout((1, 7), False), Layout((2, 2, 4), True), Layout((2, 2, 4), False), Layout((1, 1, 2, 4), True))
TENSOR = (Layout((4, 4), True, tensor=2),)
GROUPS = {layout: group for group in (SHORT, LONG, TENSOR) for layout in group}
LAYOUTS = [pytest.param(layout, id=str(layout), marks=[pytest.mark.long] * (group is not SHORT)) for layout, group in GROUPS.items()]
SPOILED = ("hidden_states", "pre_mix", "aux_hidden_states_0", "aux_hidden_states_2")


class Engines:
    """Runs `staged_engine.py` once for each layout, and once for a tensor group alone that replays its layouts."""

    def __init__(self, session, folder: Path):
        self._session, self._folder, self._results = session, folder, {}
        self.checkpoint = tiny_checkpoint.write(folder / "checkpoint", "parrot", block_gain=0.1, dspark_target_layer_ids=list(TAPS))
        self.spec = ModelSpec.from_config(json.loads((self.checkpoint / "config.json").read_text()))

    def _run(self, name: str, options: dict, env: dict, **job) -> dict:
        if name not in self._results:
            files = {kind: self._folder / f"{name}.{kind}" for kind in ("json", "log", "pickle", "trace")}
            job = {"checkpoint": str(self.checkpoint), "options": OPTIONS | options, "max_tokens": 10, "scenarios": SCENARIOS,
                   "spoil": [], "replays": [], "output": str(files["pickle"])} | job
            files["json"].write_text(json.dumps(job))
            with self._session.timed(f"stages {name}"):
                ended = run([staged_engine.__file__, str(files["json"])], files["log"], LIMIT_S,
                            env | {"VLLM_AMPERE_TRACE": str(files["trace"])})
            assert ended.code == 0, ended.output[-6000:]
            self._results[name] = pickle.loads(files["pickle"].read_bytes())
            self._results[name]["trace"] = [json.loads(line) for line in files["trace"].read_text().splitlines()]
        return self._results[name]

    def staged(self, layout: Layout) -> dict:
        """What the engine of a layout did."""
        options = {"pipeline_parallel_size": len(layout.partition), "tensor_parallel_size": layout.tensor,
                   "async_scheduling": layout.asynchronous}
        env = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layout.partition))}
        return self._run(str(layout), options, env, spoil=SPOILED if layout == SHORT[0] else [])

    def whole(self, layout: Layout) -> dict:
        """What the same tensor group without stages did, scenarios of its own before the replays."""
        group = GROUPS[layout]
        for other in group:
            self.staged(other)
        return self._run(f"whole-{group[0]}", {"tensor_parallel_size": layout.tensor}, {},
                         replays=[str(self._folder / f"{other}.pickle") for other in group])

    def replayed(self, layout: Layout) -> dict:
        """Runs of a layout's scheduler outputs without stages, by scenario."""
        return self.whole(layout)["replayed"][str(self._folder / f"{layout}.pickle")]


@pytest.fixture(scope="module")
def engines(session, tmp_path_factory):
    session.close()
    return Engines(session, tmp_path_factory.mktemp("stages"))


def drafted(seen: dict) -> list:
    """(requests, digests of taps, drafts) of every step, from the stage with the draft."""
    return next(worker["drafts"] for worker in reversed(seen["workers"]) if worker["drafts"])


def differences(seen: dict, want: dict) -> set[str]:
    """In what the steps of two runs differ, of which the first may go on longer: its last batches come back unread."""
    found = set()
    assert 0 < len(want["steps"]) <= len(seen["steps"])
    for (_, tokens, shown), (_, other_tokens, other_shown) in zip(seen["steps"], want["steps"]):
        if tokens != other_tokens:
            found.add("tokens")
        if (shown is None) != (other_shown is None) or not all(map(np.array_equal, shown or (), other_shown or ())):
            found.add("log-probabilities")
    for (_, taps, drafts), (_, other_taps, other_drafts) in zip(drafted(seen), drafted(want)):
        if taps != other_taps:
            found.add("taps")
        # Whether a last step drafts at all depends on what the scheduler knows by then.
        if None not in (drafts, other_drafts) and drafts != other_drafts:
            found.add("drafts")
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALONE)
def test_one_request_equals_one_process(engines, layout, name):
    seen, want = engines.staged(layout)["scenarios"][name], engines.whole(layout)["scenarios"][name]
    assert seen["answers"] == want["answers"]
    assert len(seen["answers"][0]) == 10
    assert differences(seen, want) == set()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_replayed_schedule_is_equal(engines, layout, name):
    """The same scheduler outputs without stages: the same bits in every step, and the same drafts from the same taps."""
    seen, want = engines.staged(layout)["scenarios"][name], engines.replayed(layout)[name]
    assert seen["scheduled"] == want["scheduled"]
    assert [step[0] for step in seen["steps"]] == [step[0] for step in want["steps"]]
    assert differences(seen, want) == set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scenarios_do_what_they_are_for(engines, layout):
    """Batches of several requests, drafts accepted in part, a prefix served, and rows left out behind the last source."""
    staged = engines.staged(layout)
    seen = staged["scenarios"]
    assert any(len(requests) == 3 for requests, *_ in seen["several"]["steps"])
    accepted = {len(tokens) for run in seen.values() for _, sampled, _ in run["steps"] for tokens in sampled}
    assert accepted & {2, 3, 4, 5} and 1 in accepted
    rows = {name: sum(len(ids) for ids, _ in seen[name]["workers"][0]["read"]) for name in ("400", "warm")}
    assert rows["400"] - rows["warm"] > 128, "the prefix cache served less than a page"
    trims = [event for event in staged["trace"] if event["event"] == "replay_trim"]
    assert (256, 128) in {(event["rows"], event["kept"]) for event in trims}
    source = engines.spec.kv_source_layer_ids[-1]
    assert [stage["replay_start"] for stage in staged["stages"][:: layout.tensor]] == [None] * (len(layout.partition) - 1) + [source]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_payload(engines, layout):
    """Streams, mix, and the taps up to the cut: by name, shape and bytes, which are those that the planner counts."""
    staged = engines.staged(layout)
    workers = len(layout.partition) * layout.tensor
    for seen in staged["scenarios"].values():
        assert [len(worker["sent"]) > 0 for worker in seen["workers"]] == [True] * (workers - layout.tensor) + [False] * layout.tensor
        for number, worker in enumerate(seen["workers"][: -layout.tensor]):
            cut = layout.starts[number // layout.tensor + 1]
            for (ids, _), sent in zip(worker["read"], worker["sent"], strict=True):
                rows = len(ids)
                taps = sum(tap <= cut for tap in TAPS)
                want = {"hidden_states": ("torch.bfloat16", (rows, STREAMS, HIDDEN)), "pre_mix": ("torch.float32", (rows, STREAMS))}
                want |= {f"aux_hidden_states_{tap}": ("torch.bfloat16", (rows, HIDDEN)) for tap in range(taps)}
                assert {name: given[:2] for name, given in sent.items()} == want
                assert sum(given[2] for given in sent.values()) == rows * crossing_bytes(engines.spec, cut, draft=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_reads_the_tokens(engines, layout):
    """Every stage gets the token ids, accepted drafts included, and a stage with an engram the ids before them."""
    staged, replayed = engines.staged(layout), engines.replayed(layout)
    assert [stage["layers"][0] for stage in staged["stages"][:: layout.tensor]] == layout.starts
    for name, seen in staged["scenarios"].items():
        want = replayed[name]["workers"][0]["read"]
        for stage, worker in zip(staged["stages"], seen["workers"]):
            first, end = stage["layers"]
            assert stage["engrams"] == [layer for layer in engines.spec.engram_layer_ids if first <= layer < end]
            assert [ids for ids, _ in worker["read"]] == [ids for ids, _ in want]
            assert [before for _, before in worker["read"]] == [before if stage["engrams"] else None for _, before in want]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_loads_its_own_embedding(engines, layout):
    """The last stage holds the checkpoint's token embedding (a share of it on each rank of a tensor group)."""
    with safe_open(shard_of(engines.checkpoint, "embed.weight"), "pt") as shard:
        parts = [digest(part) for part in shard.get_tensor("embed.weight").chunk(layout.tensor)]
    held = [stage["draft_embedding"] for stage in engines.staged(layout)["stages"]]
    assert held == [None] * (len(held) - layout.tensor) + parts


def shard_of(checkpoint: Path, name: str) -> Path:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / index["weight_map"][name]


@pytest.mark.parametrize("name, seen_in", [
    ("hidden_states", {"log-probabilities", "taps"}),
    ("pre_mix", {"log-probabilities", "taps"}),
    ("aux_hidden_states_0", {"taps", "drafts"}),
    ("aux_hidden_states_2", {"taps", "drafts"}),
])
def test_one_spoiled_row_is_noticed(engines, name, seen_in):
    """One row of one sent tensor negated in each step: the comparisons above see it, and where it has to show."""
    staged = engines.staged(SHORT[0])
    run, base = staged["spoiled"][name], staged["scenarios"]["20"]
    short, long = sorted((run, base), key=lambda given: len(given["steps"]))
    found = differences(long, short)
    assert seen_in <= found
    # Drafts that were read wrongly are slower, not wrong.
    assert (run["answers"] == base["answers"]) or "log-probabilities" in seen_in
