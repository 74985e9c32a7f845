# SPDX-License-Identifier: Apache-2.0
"""What a kernel family is worth alone: the rank slice with it, beside the same without it, in alternation.

    python benchmarks/bench_ablation.py --output FILE [--families mhc experts sampler] [--cards 1] [--rounds 5]

A family is listed where `VLLM_AMPERE_KERNELS` switches between our kernel and one that upstream has for sm_80.
Attention, the indexer, the cache writers and the engram look-up are not: upstream has none for sm_80, and our
references, which could be asked for, are no rival. Model and clock are those of `bench_rank_slice.py`, as sm_80 code.
The two engines of a family share a card and answer one at a time; families are spread over the cards.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import receipt  # noqa: E402
from benchmarks.bench_rank_slice import DSPARK, ENVIRONMENT, OPTIONS, fill, label, measure, write_config  # noqa: E402

POINTS = [(1, 256), (8, 256), (1, 8_192)]


@dataclass(frozen=True)
class Family:
    """Two settings of `VLLM_AMPERE_KERNELS`, "" for the default, and engine keywords of both."""

    ours: str
    upstream: str
    options: dict = field(default_factory=dict)


FAMILIES = {
    "mhc": Family("", "mhc_post_pre=upstream"),
    "experts": Family("", "mxfp4_experts_decode=upstream"),
    "sampler": Family("", "markov_sampler=upstream", DSPARK),
}


class Engine:
    """A child process with one engine, which measures a point when told to.

    Args:
        folder: with the config.json; takes the log.
        name: of the log.
        kernels: `VLLM_AMPERE_KERNELS`.
        options: engine keywords on top of `OPTIONS`.
        card: index of the card.
    """

    def __init__(self, folder: Path, name: str, kernels: str, options: dict, card: int):
        self._log, self._name = folder / f"{name}.log", name
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        env = ENVIRONMENT | {
            "VLLM_AMPERE_ASSUME": "sm80", "VLLM_AMPERE_KERNELS": kernels,
            "TRITON_CACHE_DIR": str(folder / f"triton-{name}"),
            "CUDA_VISIBLE_DEVICES": visible.split(",")[card] if visible else str(card),
        }  # fmt: skip
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--child", str(folder), json.dumps(options)], env=os.environ | env,
                text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def ask(self, *point: int) -> dict:
        """What `measure` found at (requests, context).

        Raises:
            RuntimeError: the engine ended; the message holds the end of its log.
        """
        try:
            self._process.stdin.write(json.dumps(point) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its answer will be none
        answer = self._process.stdout.readline()
        if not answer:
            end = "\n".join(self._log.read_text(errors="replace").splitlines()[-40:])
            raise RuntimeError(f"the engine {self._name} ended with {self._process.wait()}:\n{end}")
        return json.loads(answer)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def child(folder: str, options: dict) -> None:
    """One engine; reads points from stdin, writes what they took to stdout, and logs to stderr."""
    from vllm import LLM
    from vllm.model_executor.model_loader import dummy_loader

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    dummy_loader.initialize_single_dummy_weight = fill
    llm = LLM(model=folder, **OPTIONS | {"max_model_len": 10_000} | options)
    for line in sys.stdin:
        print(json.dumps(measure(llm, *json.loads(line))), file=answers, flush=True)


def run_family(folder: Path, name: str, card: int, rounds: int) -> dict[str, list[dict]]:
    """Point -> {"ours", "upstream"} of each round; who goes first changes with the round."""
    family = FAMILIES[name]
    settings = {"ours": family.ours, "upstream": family.upstream}
    engines = {side: Engine(folder, f"{name}-{side}", each, family.options, card) for side, each in settings.items()}
    try:
        for point in POINTS * 2:  # upstream compiles kernels at the first step of a size
            for engine in engines.values():
                engine.ask(*point)
        found = {}
        for requests, context in POINTS:
            taken = found[f"bs{requests}-ctx{label(context)}"] = []
            for number in range(rounds):
                order = list(engines)[:: 1 if number % 2 else -1]
                taken.append({side: engines[side].ask(requests, context) for side in order})
        return found
    finally:
        for engine in engines.values():
            engine.stop()


def figures(family: str, found: dict[str, list[dict]]) -> list[dict]:
    """Decode step and prefill of both sides, and upstream's time over ours: above 1, ours is ahead.

    A value is the median over the rounds of what each gave, with the lowest and the highest.
    """
    listed = []
    for point, rounds in found.items():
        for part, key in (("decode", "steps_s"), ("prefill", "prefill_s")):
            values = {
                side: [float(np.median(each[side][key])) * 1e3 for each in rounds] for side in ("ours", "upstream")
            }
            series = {f"{side}-ms": taken for side, taken in values.items()}
            series["vs-upstream"] = [theirs / ours for ours, theirs in zip(values["ours"], values["upstream"])]
            for measured, taken in series.items():
                shown = {"value": statistics.median(taken), "low": min(taken), "high": max(taken)}
                shown = {key: float(f"{value:.5g}") for key, value in shown.items()}
                unit = "ms" if measured.endswith("-ms") else "x"
                listed.append({"id": f"ablation_tp8/{family}/{part}-{point}/{measured}", "unit": unit} | shown)
    return listed


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], json.loads(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="receipt to write")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--cards", type=int, default=1, help="to spread the families over (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each point (default: 5)")
    arguments = parser.parse_args()
    if arguments.cards < 1 or arguments.rounds < 1:
        parser.error("--cards and --rounds are 1 or more")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_config(folder)

        def run_card(card: int) -> dict:
            mine = arguments.families[card :: arguments.cards]
            return {name: run_family(folder, name, card, arguments.rounds) for name in mine}

        with ThreadPoolExecutor(arguments.cards) as pool:
            found = {name: taken for part in pool.map(run_card, range(arguments.cards)) for name, taken in part.items()}
    listed = [figure for name, taken in found.items() for figure in figures(name, taken)]
    for figure in listed:
        print("{value:>12.5g}  {unit:<3} {id}  {low:.5g} to {high:.5g}".format_map(figure))
    receipt.write(arguments.output, "ablation",
                  "sm_80 code on H200; each family's kernel beside upstream's, the rest alike",
                  "tests/gpu/engine of the same commit; the weights here are random", listed, found)


if __name__ == "__main__":
    main()
