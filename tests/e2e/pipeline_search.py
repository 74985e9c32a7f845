# SPDX-License-Identifier: Apache-2.0
"""`make search-pipeline`: random schedules in engines of stages, looking for a bit that one process gives otherwise.

Engines of a group share checkpoint, options and tensor ranks; beside them runs one engine of the group without stages.
It schedules a scenario with one request in flight for itself, and executes the scheduler outputs of any other. So every
difference is one of stages. At the end each engine has a tensor spoiled on its way, which has to be found.

A search that was stopped goes on with `--resume`, from the receipt, which is written after every scenario.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from threading import Event, Lock

from tqdm import tqdm

from benchmarks import receipt
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import OPTIONS

from .kept_engine import KeptEngine
from .random_scenarios import Scenario, random_scenario
from .scenarios import DRAFTS
from .stage_differences import differences

# The smallest pool that vLLM takes for one longest request over stages. Requests are let in before it has room for all
# of their prompt, so that they are preempted inside it too.
OPTIONS = OPTIONS | {"max_model_len": 1024, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 420,
                     "scheduler_reserve_full_isl": False, "skip_tokenizer_init": True}
# The draft reads the inputs of these layers, which are before, on and after cuts.
DRAFTED = {"block_gain": 0.1, "drafts_agree": True, "dspark_markov_rank": 256, "dspark_target_layer_ids": [1, 2, 4, 6]}
CONTROLS = 5  # scenarios in which a spoiled tensor has to be found
SHARERS = 6  # engines that one without stages serves, one after the other


@dataclass(frozen=True)
class Group:
    """Preset and overrides of a checkpoint, and engine keywords beside the common ones."""

    preset: str
    overrides: dict
    options: dict = field(default_factory=dict)


GROUPS = {
    "drafts": Group("parrot", DRAFTED, {"speculative_config": DRAFTS}),
    "plain": Group("sharp", {}),
    "no-replay": Group("parrot", DRAFTED, {"speculative_config": DRAFTS, "swa_bounded_replay": False}),
    "tp2": Group("parrot", DRAFTED, {"speculative_config": DRAFTS, "tensor_parallel_size": 2}),
}


@dataclass(frozen=True)
class Layout:
    """A group's engine of stages: layers of each stage, and whether it schedules asynchronously."""

    group: str
    partition: tuple[int, ...]
    asynchronous: bool

    def __str__(self):
        return f"{self.group}-{','.join(map(str, self.partition))}-{'async' if self.asynchronous else 'sync'}"


# Starts at layers 1, 2 and 4 need nothing but the streams; the others are inside a group that shares a cache. The
# release's 14,14,12 is 4,2,2 here: a stage starts at the last KV source, the next one inside its group.
LAYOUTS = [Layout(*layout) for layout in (
    ("drafts", (4, 2, 2), True), ("drafts", (6, 2), False), ("drafts", (5, 3), True), ("drafts", (7, 1), False),
    ("drafts", (3, 5), True), ("drafts", (5, 1, 2), False), ("drafts", (4, 4), True), ("drafts", (2, 6), False),
    ("drafts", (1, 7), True), ("drafts", (1, 1, 2, 4), False), ("drafts", (3, 2, 2, 1), True),
    ("plain", (5, 1, 2), True), ("plain", (7, 1), True), ("plain", (3, 5), False), ("plain", (2, 2, 4), False),
    ("no-replay", (5, 3), True), ("no-replay", (6, 2), False), ("no-replay", (4, 4), False),
    ("tp2", (4, 2, 2), True), ("tp2", (5, 3), False), ("tp2", (4, 4), True),
)]
NAMED = {str(layout): layout for layout in LAYOUTS}


class Stopped(Exception):
    """Raised after a scenario: another thread of the search failed, or the search was interrupted."""


@dataclass
class Outcome:
    """What became of one engine.

    Attributes:
        seeds: of its scenarios.
        scenarios, several: how many were compared, and in how many of them requests were in flight together.
        steps, tokens, log_probabilities: engine steps, sampled tokens and values of log-probabilities that were equal.
        preempted, cached, aborted: preemptions, prompt tokens that the prefix cache served, requests aborted.
        trimmed: trace events of bounded replay that left rows out.
        crossed: names of tensors that went from a stage to the next.
        found: {"seed", "round", "in", "command"} of each scenario that differs.
        controls: tensor -> scenarios until it was found spoiled, or None if it was not.
        broken: the end of the log of an engine that ended or hung.
        seconds: of the last start of this engine, and in all.
    """

    engine: str
    seeds: list[int]
    scenarios: int = 0
    several: int = 0
    steps: int = 0
    tokens: int = 0
    log_probabilities: int = 0
    preempted: int = 0
    cached: int = 0
    aborted: int = 0
    trimmed: int = 0
    crossed: list[str] = field(default_factory=list)
    found: list[dict] = field(default_factory=list)
    controls: dict[str, int | None] = field(default_factory=dict)
    broken: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return bool(self.controls)

    @property
    def right(self) -> bool:
        return self.done and not self.found and not self.broken and None not in self.controls.values()

    def count(self, scenario: Scenario, runs: list[dict]) -> None:
        """Add a scenario that is equal."""
        self.several += not scenario.one_in_flight
        for run in runs:
            self.steps += len(run["steps"])
            self.tokens += sum(len(tokens) for _, sampled, _ in run["steps"] for tokens in sampled)
            self.log_probabilities += sum(array.size for *_, shown in run["steps"] for array in shown[1::2])
            self.preempted += run["preempted"]
            self.cached += run["cached"]
            self.aborted += run["answers"].count(None)
            sent = [tensors for worker in run["workers"] for tensors in worker["sent"]]
            self.crossed = sorted(set(self.crossed).union(*sent))


def run(staged: KeptEngine, scenario: Scenario) -> list[dict]:
    staged.call("forget", scenario.withheld)
    return [staged.call("scenario", requests) for requests in scenario.rounds]


def first_difference(whole: KeptEngine, scenario: Scenario, runs: list[dict]) -> tuple[int, list[str]] | None:
    """Number of the first round that the engine without stages does otherwise, and in what; None if there is none."""
    whole.call("forget")
    for number, (requests, seen) in enumerate(zip(scenario.rounds, runs, strict=True)):
        if scenario.one_in_flight:
            want = whole.call("scenario", requests)
            found = differences(seen, want) | ({"answers"} if seen["answers"] != want["answers"] else set())
        else:
            want = whole.call("replay", seen)
            found = differences(seen, want)
            if not found and len(want["steps"]) != len(seen["steps"]):
                found = {"steps"}
        if found:
            return number, sorted(found)
    return None


def examine(staged: KeptEngine, whole: KeptEngine, outcome: Outcome, told: Callable[[], None]) -> None:
    """Compare the scenarios that are left, the next one running while the last is compared, then spoil its tensors."""

    def compare(seed: int, scenario: Scenario, runs: list[dict]) -> None:
        if found := first_difference(whole, scenario, runs):
            command = f'make search-pipeline SEARCH="--engine {outcome.engine} --seed {seed}"'
            outcome.found.append({"seed": seed, "round": found[0], "in": found[1], "command": command})
        else:
            outcome.count(scenario, runs)
        outcome.scenarios += 1
        told()

    with ThreadPoolExecutor(1) as beside:
        compared = None
        for seed in outcome.seeds[outcome.scenarios :]:
            scenario = random_scenario(seed)
            runs = run(staged, scenario)
            if compared:
                compared.result()
            compared = beside.submit(compare, seed, scenario, runs)
        if compared:
            compared.result()
    outcome.trimmed = sum(len(staged.events(kind)) for kind in ("replay_trim", "replay_rows"))
    relayed = [name for name in outcome.crossed if name == "hidden_states" or name.startswith("relay_")]
    outcome.controls = {name: scenarios_to_find(staged, whole, name) for name in relayed}
    told()


def scenarios_to_find(staged: KeptEngine, whole: KeptEngine, name: str) -> int | None:
    """In which scenario, from 1, the tensor is found spoiled; None if in none of `CONTROLS`."""
    staged.call("spoil", name)
    for seed in range(CONTROLS):
        scenario = random_scenario(seed)
        if first_difference(whole, scenario, run(staged, scenario)):
            break
    else:
        seed = None
    staged.call("spoil", None)
    return None if seed is None else seed + 1


def start(folder: Path, name: str, group: Group, options: dict, env: dict) -> KeptEngine:
    overrides = "-drafted" if group.overrides else ""
    checkpoint = tiny_checkpoint.write(folder / f"{group.preset}{overrides}", group.preset, **group.overrides)
    job = {"checkpoint": str(checkpoint), "options": OPTIONS | group.options | options, "sampling": {"logprobs": -1}}
    return KeptEngine(folder, name, job, env)


def search(outcomes: list[Outcome], folder: Path, told: Callable[[Outcome], None], at_once: int = 1) -> None:
    """Run every engine that is not done, to its end.

    Args:
        outcomes: of the engines, those of a group together; they are filled in.
        folder: takes checkpoints, logs and traces.
        told: called with the outcome after every scenario, from several threads.
        at_once: engines of stages that run at a time, each beside one without.
    """
    left, shares = [outcome for outcome in outcomes if not outcome.done], []
    for _, members in groupby(left, lambda outcome: NAMED[outcome.engine].group):
        members = list(members)
        shares += [members[at : at + SHARERS] for at in range(0, len(members), SHARERS)]
    stopping = Event()

    def telling(outcome: Outcome) -> None:
        told(outcome)
        if stopping.is_set():
            raise Stopped

    def search_share(share: list[Outcome]) -> None:
        try:
            if not stopping.is_set():
                _search_share(share, folder, telling)
        except Stopped:
            pass
        except BaseException:
            stopping.set()
            raise

    with ThreadPoolExecutor(at_once) as threads:
        try:
            for _ in threads.map(search_share, shares):
                pass
        except BaseException:  # Ctrl-C too
            stopping.set()
            raise


def _search_share(outcomes: list[Outcome], folder: Path, told: Callable[[Outcome], None]) -> None:
    first = NAMED[outcomes[0].engine]
    group = GROUPS[first.group]
    with start(folder, f"{first}-whole", group, {}, {}) as whole:
        for outcome in outcomes:
            layout, began = NAMED[outcome.engine], time.monotonic()
            options = {"pipeline_parallel_size": len(layout.partition), "async_scheduling": layout.asynchronous}
            env = {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, layout.partition))}
            try:
                with start(folder, str(layout), group, options, env) as staged:
                    assert staged.stages
                    outcome.seconds["start"] = round(time.monotonic() - began, 1)
                    examine(staged, whole, outcome, lambda: told(outcome))
            except RuntimeError as error:
                outcome.broken = str(error)
            outcome.seconds["all"] = round(outcome.seconds.get("all", 0) + time.monotonic() - began, 1)
            told(outcome)


def write_receipt(path: Path, outcomes: list[Outcome]) -> None:
    counted = ("scenarios", "several", "steps", "tokens", "log_probabilities", "preempted", "cached", "aborted",
               "trimmed")
    sums = {name: sum(getattr(outcome, name) for outcome in outcomes) for name in counted}
    sums |= {"engines": sum(outcome.scenarios > 0 for outcome in outcomes),
             "differences": sum(len(outcome.found) for outcome in outcomes),
             "wrong": sum(not outcome.right for outcome in outcomes)}
    controls = [after is not None for outcome in outcomes for after in outcome.controls.values()]
    # The newest figure of an id counts: a search of some engines must not stand for one of all.
    names = [outcome.engine for outcome in outcomes]
    search_id = "pipeline_search" if len(names) == len(LAYOUTS) else f"pipeline_search.{'+'.join(names)}"
    figures = [{"id": f"{search_id}.{name}", "value": value, "unit": "count"} for name, value in sums.items()]
    receipt.write(path, "search-pipeline", "engines of stages against one process, tiny random model, CPU",
                  f"{sum(controls)} of {len(controls)} spoiled tensors were found", figures,
                  {"engines": [asdict(outcome) for outcome in outcomes]})


def resumed(path: Path) -> list[Outcome]:
    """The outcomes of a receipt; engines that broke are begun again where they ended."""
    read = json.loads(path.read_text())
    if read["commit"] != receipt.header("", "")["commit"]:
        sys.exit(f"{path} is of commit {read['commit']}, not this one\nhint: search anew without --resume")
    return [Outcome(**engine | {"broken": ""}) for engine in read["samples"]["engines"]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="make search-pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", type=int, default=504, help="in all, dealt out to the engines (default 504)")
    parser.add_argument("--engine", action="append", metavar="NAME", choices=[*NAMED],
                        help="this one only; repeatable; one of " + " ".join(NAMED))
    parser.add_argument("--seed", action="append", type=int, help="this scenario in every engine; repeatable")
    parser.add_argument("--at-once", type=int, default=1, help="engines of stages that run at a time (default 1)")
    parser.add_argument("--receipt", type=Path, default=Path("pipeline-receipt.json"))
    parser.add_argument("--resume", action="store_true", help="run what the receipt lacks, by its engines and seeds")
    parser.add_argument("--folder", type=Path, default=Path(".cache/search-pipeline"), help="checkpoints and logs")
    asked = parser.parse_args(arguments)
    if asked.resume:
        outcomes = resumed(asked.receipt)
    else:
        names = [name for name in NAMED if not asked.engine or name in asked.engine][: asked.scenarios]
        outcomes = [Outcome(name, asked.seed or list(range(number, asked.scenarios, len(names))))
                    for number, name in enumerate(names)]
    asked.folder.mkdir(parents=True, exist_ok=True)
    writing = Lock()
    with tqdm(total=sum(len(outcome.seeds) for outcome in outcomes), unit="scenario") as bar:
        def told(last: Outcome) -> None:
            with writing:
                bar.set_postfix_str(f"{last.engine}, {sum(len(outcome.found) for outcome in outcomes)} differ")
                bar.update(sum(outcome.scenarios for outcome in outcomes) - bar.n)
                write_receipt(asked.receipt, outcomes)

        search(outcomes, asked.folder.resolve(), told, asked.at_once)
    for outcome in outcomes:
        for found in outcome.found:
            print(f"{outcome.engine}, seed {found['seed']}: {', '.join(found['in'])} differ\n    {found['command']}")
        for name, after in outcome.controls.items():
            if after is None:
                print(f"{outcome.engine}: {name} spoiled, and nothing was found")
        if outcome.broken:
            print(f"{outcome.engine}: {outcome.broken}")
    print(f"{sum(outcome.scenarios for outcome in outcomes)} scenarios in {len(outcomes)} engines: {asked.receipt}")
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
