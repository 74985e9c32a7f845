# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages with DSpark, engram and bounded replay: bit by bit the engine of one process.

The draft reads the inputs of layers 1, 2, 4 and 6. So at a cut before one of these layers its input is taken on the cut,
and others before and after it. Starts 3, 5, 6 and 7 are inside a group with one KV source: there the relay carries on
what the source computed. One request in flight is held against one process that schedules for itself. Several
are batched in another order over stages, so they are held against one process that executes the same scheduler outputs.
"""

import json
import pickle
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors import safe_open

from vllm.ampere.cache_layout import HEAD_DIM
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.pipeline_cut import CANDIDATES, LATENT, TOPK, cut_at, keeps_last_rows
from vllm.ampere.planner.pipeline import payload_bytes
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import OPTIONS, run

from .collectives import expected, in_layers
from .scenarios import DRAFTS, prompt
from .stage_differences import differences, drafted
from .stage_recorder import digest

pytestmark = pytest.mark.vllm
TAPS = (1, 2, 4, 6)
HIDDEN, STREAMS = 256, 4
OPTIONS = OPTIONS | {"speculative_config": DRAFTS, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 1000,
                     "skip_tokenizer_init": True}
# One short; one past top-k, candidates and a chunk's end; it again, from the prefix cache; three, one of them late.
TEXT = {
    "20": [[prompt(20, 7), 0]],
    "400": [[prompt(400, 7), 0]],
    "warm": [[prompt(400, 7), 0]],
    "several": [[prompt(330, 8), 0], [prompt(90, 8), 0], [prompt(30, 8), 3]],
}
# An image of 17 places, at the beginning of a prompt or inside it.
IMAGES = {
    "image": [[{"ids": [129264, *prompt(40, 9)], "image": [1, 168, 126]}, 0]],
    "several": [[{"ids": [*prompt(20, 9), 129264, *prompt(30, 9)], "image": [2, 168, 126]}, 0], [prompt(90, 8), 0]],
}
NEW_TOKENS = 9
LIMIT_S = 900


@dataclass(frozen=True)
class Layout:
    """Layers of each stage, whether scheduling is asynchronous, ranks of the tensor group, images in the prompts."""

    partition: tuple[int, ...]
    asynchronous: bool
    tensor: int = 1
    images: bool = False

    def __str__(self):
        name = f"{','.join(map(str, self.partition))}-{'async' if self.asynchronous else 'sync'}"
        return name + f"-tp{self.tensor}" * (self.tensor > 1) + "-images" * self.images

    @property
    def scenarios(self) -> dict:
        return IMAGES if self.images else TEXT

    @property
    def starts(self) -> list[int]:
        return [sum(self.partition[:stage]) for stage in range(len(self.partition))]


# The second stage starts at the last KV source (20,20 of the release), or at the first; at an index source behind the last
# KV source (28 of 14,14,12), or at the layer after it, before which no row is left out.
SHORT = (Layout((4, 4), True), Layout((2, 6), False), Layout((6, 2), True), Layout((5, 3), False))
# The same scheduled the other way; starts 1 (after one window layer), 3 (ratio 2) and 7 (no index source behind it); groups
# over three stages, and over four, one of which ends with the source; 4,2,2 has the shape of 14,14,12.
LONG = (Layout((4, 4), False), Layout((2, 6), True), Layout((1, 7), True), Layout((1, 7), False), Layout((2, 2, 4), True),
        Layout((2, 2, 4), False), Layout((1, 1, 2, 4), True), Layout((6, 2), False), Layout((5, 3), True),
        Layout((3, 5), True), Layout((7, 1), False), Layout((4, 2, 2), True), Layout((5, 1, 2), False),
        Layout((3, 2, 1, 2), True), Layout((1, 4, 2, 1), False))
TENSOR = (Layout((4, 4), True, tensor=2), Layout((6, 2), True, tensor=2), Layout((4, 2, 2), False, tensor=2))
VISION = (Layout((2, 6), True, images=True), Layout((6, 2), True, images=True))
GROUPS = {layout: group for group in (SHORT, LONG, TENSOR, VISION) for layout in group}
LAYOUTS = [pytest.param(layout, id=str(layout), marks=[pytest.mark.long] * (group is not SHORT))
           for layout, group in GROUPS.items()]
ALONE = [pytest.param(*case.values, name, id=f"{case.id}-{name}", marks=case.marks)
         for case in LAYOUTS for name in case.values[0].scenarios if name != "several"]
# Tensors that are spoiled once: the scenario, and in what that has to show.
SPOILED = {
    SHORT[0]: {"hidden_states": ("20", {"log-probabilities", "taps"}), "pre_mix": ("20", {"log-probabilities", "taps"}),
               "aux_hidden_states_0": ("20", {"taps"})},
    SHORT[1]: {"input_ids": ("20", {"log-probabilities"}), "lookback_token_ids": ("20", {"log-probabilities"})},
    SHORT[2]: {LATENT: ("warm", {"log-probabilities"}), CANDIDATES: ("warm", {"log-probabilities"})},
    SHORT[3]: {LATENT: ("warm", {"log-probabilities"}), TOPK: ("warm", {"log-probabilities"}),
               CANDIDATES: ("warm", {"log-probabilities"})},
    VISION[0]: {"input_ids": ("image", {"log-probabilities"})},
}


class Engines:
    """Runs `staged_engine.py` once for each layout, and once for a tensor group alone that replays its layouts."""

    def __init__(self, session, folder: Path):
        self._session, self._folder = session, folder
        self._results, self._broken = {}, {}

    def checkpoint(self, layout: Layout) -> Path:
        preset = "vision" if layout.images else "parrot"
        return tiny_checkpoint.write(self._folder / preset, preset, block_gain=0.1, drafts_agree=True,
                                     dspark_markov_rank=256, dspark_target_layer_ids=list(TAPS))

    def spec(self, layout: Layout) -> ModelSpec:
        return ModelSpec.from_config(json.loads((self.checkpoint(layout) / "config.json").read_text()))

    def _run(self, name: str, layout: Layout, options: dict, env: dict, **job) -> dict:
        if name in self._broken:
            pytest.fail(f"{name} did not end well before: {self._broken[name]}", pytrace=False)
        if name not in self._results:
            files = {kind: self._folder / f"{name}.{kind}" for kind in ("json", "log", "pickle", "trace")}
            options = OPTIONS | {"tensor_parallel_size": layout.tensor} | options
            if layout.images:
                options |= {"limit_mm_per_prompt": {"image": 1}, "skip_tokenizer_init": False}
            sampling = {"max_tokens": NEW_TOKENS, "logprobs": 20 if layout.images else -1}
            job |= {"checkpoint": str(self.checkpoint(layout)), "options": options, "sampling": sampling,
                    "scenarios": layout.scenarios, "output": str(files["pickle"])}
            files["json"].write_text(json.dumps(job))
            files["trace"].touch()  # a run without events leaves none
            with self._session.timed(f"stages {name}"):
                command = [str(Path(__file__).with_name("staged_engine.py")), str(files["json"])]
                ended = run(command, files["log"], LIMIT_S, env | {"VLLM_AMPERE_TRACE": str(files["trace"])})
            if ended.code != 0:
                self._broken[name] = ended.output[-6000:]
                pytest.fail(f"{name} ended with {ended.code}:\n{ended.output[-6000:]}", pytrace=False)
            self._results[name] = pickle.loads(files["pickle"].read_bytes())
            self._results[name]["trace"] = [json.loads(line) for line in files["trace"].read_text().splitlines()]
        return self._results[name]

    def staged(self, layout: Layout) -> dict:
        """What the engine of a layout did."""
        options = {"pipeline_parallel_size": len(layout.partition), "async_scheduling": layout.asynchronous}
        env = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layout.partition))}
        spoil = {name: scenario for name, (scenario, _) in SPOILED.get(layout, {}).items()}
        return self._run(str(layout), layout, options, env, spoil=spoil, replays=[])

    def whole(self, layout: Layout) -> dict:
        """What the same tensor group without stages did: the scenarios, by itself, then the replays."""
        group = GROUPS[layout]
        for other in group:
            self.staged(other)
        replays = [str(self._folder / f"{other}.pickle") for other in group]
        return self._run(f"whole-{group[0]}", layout, {}, {}, spoil={}, replays=replays)

    def same(self, layout: Layout, name: str) -> dict:
        """The run without stages that a scenario has to equal: a replay where several requests are in flight."""
        if name == "several":
            return self.whole(layout)["replayed"][str(self._folder / f"{layout}.pickle")]
        return self.whole(layout)["scenarios"][name]


@pytest.fixture(scope="module")
def engines(session, tmp_path_factory):
    session.close()
    return Engines(session, tmp_path_factory.mktemp("stages"))


@pytest.mark.parametrize("layout, name", ALONE)
def test_one_request_equals_one_process(engines, layout, name):
    seen, want = engines.staged(layout)["scenarios"][name], engines.same(layout, name)
    assert seen["answers"] == want["answers"]
    assert len(seen["answers"][0]) == NEW_TOKENS and drafted(want)
    assert differences(seen, want) == set()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_requests_equal_the_replay_of_their_schedule(engines, layout):
    """The same scheduler outputs without stages: the same bits in every step, the same drafts from the same taps."""
    seen, want = engines.staged(layout)["scenarios"]["several"], engines.same(layout, "several")
    assert [step[0] for step in seen["steps"]] == [step[0] for step in want["steps"]]
    assert any(len(requests) > 1 for requests, *_ in seen["steps"]) and drafted(want)
    assert differences(seen, want) == set()


@pytest.mark.parametrize("layout", [case for case in LAYOUTS if not case.values[0].images])
def test_scenarios_do_what_they_are_for(engines, layout):
    """Drafts accepted in part, a prefix served, and rows left out behind the last source, on every stage behind it."""
    staged = engines.staged(layout)
    seen = staged["scenarios"]
    accepted = {len(tokens) for run in seen.values() for _, sampled, _ in run["steps"] for tokens in sampled}
    assert accepted & {2, 3, 4, 5} and 1 in accepted
    rows = {name: sum(len(ids) for ids, *_ in seen[name]["workers"][0]["read"]) for name in ("400", "warm")}
    assert rows["400"] - rows["warm"] > 128, "the prefix cache served less than a page"
    trims = [event for event in staged["trace"] if event["event"] in ("replay_trim", "replay_rows")]
    assert (256, 128) in {(event["rows"], event["kept"]) for event in trims}
    source, layers = engines.spec(layout).kv_source_layer_ids[-1], [stage["layers"] for stage in staged["stages"]]
    # The source itself runs on all rows where it is its stage's last layer.
    want = [max(start, source) if end > max(source + 1, start) else None for start, end in layers]
    assert [stage["replay_start"] for stage in staged["stages"]] == want


def kept_rows(positions: list[int], window: int) -> int:
    """Rows of a step that bounded replay keeps: the last window of each request, whose positions are consecutive."""
    starts = [row for row in range(len(positions)) if not row or positions[row] != positions[row - 1] + 1]
    return sum(min(end - start, window) for start, end in pairwise([*starts, len(positions)]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_payload(engines, layout):
    """Streams, mix, taps up to the cut, and the relay's: by name, shape and bytes, which are those the planner counts."""
    staged, spec = engines.staged(layout), engines.spec(layout)
    listed = spec.candidate_topk_blocks * spec.candidate_block_size
    senders = (len(layout.partition) - 1) * layout.tensor
    for seen in staged["scenarios"].values():
        assert not any(worker["sent"] for worker in seen["workers"][senders:])
        for number, worker in enumerate(seen["workers"][:senders]):
            start = layout.starts[number // layout.tensor + 1]
            cut = cut_at(spec, start)
            for (ids, positions, _), sent in zip(worker["read"], worker["sent"], strict=True):
                rows = kept_rows(positions, spec.sliding_window) if keeps_last_rows(spec, start) else len(ids)
                taps = sum(tap <= start for tap in TAPS)
                want = {f"aux_hidden_states_{tap}": ("torch.bfloat16", (rows, HIDDEN)) for tap in range(taps)}
                want["hidden_states"] = "torch.bfloat16", (rows, STREAMS, HIDDEN)
                want["pre_mix"] = "torch.float32", (rows, STREAMS)
                if cut is not None:
                    want[LATENT] = "torch.bfloat16", (len(ids), HEAD_DIM)
                    if cut.topk:
                        want[TOPK] = "torch.int32", (rows, spec.index_topk)
                    # The engine counts drafts that were rejected as well.
                    longest = max(positions) + 1
                    assert CANDIDATES not in sent or (cut.candidates and longest + NEW_TOKENS > listed)
                    if cut.candidates and longest > listed:
                        want[CANDIDATES] = "torch.int32", (rows, spec.candidate_topk_blocks)
                    elif CANDIDATES in sent:
                        del sent[CANDIDATES]
                assert {name: given[:2] for name, given in sent.items()} == want
                counted = payload_bytes(spec, start, True, len(ids), rows, max(positions) + 1)
                assert {name: given[2] for name, given in sent.items()} == counted


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_stage_reads_the_tokens(engines, layout):
    """Every stage has the ids and positions, after rejected drafts too; one with an engram the ids before them."""
    staged, engrams = engines.staged(layout), engines.spec(layout).engram_layer_ids
    assert [stage["layers"][0] for stage in staged["stages"][:: layout.tensor]] == layout.starts
    for name, seen in staged["scenarios"].items():
        want = engines.same(layout, name)["workers"][0]["read"]
        assert any(129264 in ids for ids, *_ in want) == layout.images
        for stage, worker in zip(staged["stages"], seen["workers"]):
            first, end = stage["layers"]
            assert stage["engrams"] == [layer for layer in engrams if first <= layer < end]
            for (*rows, before), (*same_rows, same_before) in zip(worker["read"], want):
                assert rows == same_rows
                assert before == (same_before if stage["engrams"] else None)


@pytest.mark.parametrize("layout", [case for case in LAYOUTS if case.values[0].tensor > 1])
def test_every_collective_once_a_layer(engines, layout):
    """A step sums twice a layer, no more and no less, on every rank alike; an engram gathers twice."""
    staged, spec = engines.staged(layout), engines.spec(layout)
    for seen in staged["scenarios"].values():
        for number, (stage, worker) in enumerate(zip(staged["stages"], seen["workers"], strict=True)):
            assert worker["read"] and in_layers(worker) == expected(spec, range(*stage["layers"]), len(worker["read"]))
            first = seen["workers"][number - number % layout.tensor]
            assert worker["collectives"] == first["collectives"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_loads_its_own_embedding(engines, layout):
    """The last stage holds the checkpoint's token embedding (a share of it on each rank of a tensor group)."""
    with safe_open(shard_of(engines.checkpoint(layout), "embed.weight"), "pt") as shard:
        parts = [digest(part) for part in shard.get_tensor("embed.weight").chunk(layout.tensor)]
    held = [stage["draft_embedding"] for stage in engines.staged(layout)["stages"]]
    assert held == [None] * (len(held) - layout.tensor) + parts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selections_are_received_where_layers_read_them(engines, layout):
    """At fixed addresses, as a captured graph needs, and without another copy."""
    spec, staged = engines.spec(layout), engines.staged(layout)
    for stage in staged["stages"]:
        cut = cut_at(spec, stage["layers"][0])
        want = {name for name, crosses in ((TOPK, cut and cut.topk), (CANDIDATES, cut and cut.candidates)) if crosses}
        assert stage["in_place"] == want


def shard_of(checkpoint: Path, name: str) -> Path:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    return checkpoint / index["weight_map"][name]


@pytest.mark.parametrize("layout, name", [
    pytest.param(*case.values, name, id=f"{case.id}-{name}", marks=case.marks)
    for case in LAYOUTS for name in SPOILED.get(case.values[0], ())
])
def test_one_spoiled_row_is_noticed(engines, layout, name):
    """One row of one tensor spoiled in each step: the comparison above sees it, and it shows where it has to."""
    staged = engines.staged(layout)
    scenario, shows = SPOILED[layout][name]
    spoiled, right = staged["spoiled"][name], staged["scenarios"][scenario]
    shorter, longer = sorted((spoiled, right), key=lambda seen: len(seen["steps"]))
    found = differences(longer, shorter)
    assert shows <= found
    if name.startswith("aux_hidden_states"):  # bad drafts are slow, not wrong
        assert spoiled["answers"] == right["answers"]
