# SPDX-License-Identifier: Apache-2.0
"""The whole V4.1 (40 layers, 64 heads, 384 experts) over several cards, topology by topology: its weights, tokens and times.

    python benchmarks/bench_topologies.py --output FILE [--topologies 8:40 8:40:ep 4:20,20 2:8,12,20 2:14,14,12]

A topology is TENSOR:LAYERS of each stage, `:ep` with whole experts on a rank. All run the same code (sm_80 on a newer card) on
the same drawn weights (`drawn_weights.py`; about 285 GiB, engram tables small), one after the other, with points and clock of
`bench_rank_slice.py`. Weights of each rank and tokens of the cache are held against the planner's, and its step times stand
beside the measured ones. The first topology's greedy tokens are what the others' are compared with.
"""

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import receipt  # noqa: E402
from benchmarks.bench_rank_slice import OPTIONS, SHARE, label, measure, run_engines  # noqa: E402
from vllm.ampere.model_spec import ModelSpec  # noqa: E402
from vllm.ampere.planner.inventory import Inventory  # noqa: E402
from vllm.ampere.planner.kv_blocks import KvBlocks  # noqa: E402
from vllm.ampere.planner.latency import decode_step  # noqa: E402
from vllm.ampere.planner.pipeline import stages  # noqa: E402
from vllm.ampere.planner.weights import WeightTable  # noqa: E402
from vllm.ampere.tensor_table import expected_tensors  # noqa: E402
from vllm.ampere.testing import tiny_checkpoint, tiny_config  # noqa: E402

GIB = 2**30
DEFAULT = ["8:40", "8:40:ep", "4:20,20", "2:8,12,20", "2:14,14,12"]
POINTS = [(1, 256), (8, 256), (32, 256), (1, 16_384), (1, 65_536)]
# Tokens of each prompt that is continued greedily, by how many.
PROMPTS, CONTINUED, BEST = [20, 300, 700, 3_000], 24, 5
FULL = SHARE | {
    "vocab_size": 129_280, "num_attention_heads": 64, "o_groups": 8, "moe_intermediate_size": 2_304, "engram_layer_ids": [1, 3],
    "engram_vocab_size": 1_000, "own_tokenizer": True,
}
# Router biases so wide that the chosen experts hardly depend on rounding.
PRESET = "sharp"
CACHE_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")


@dataclass(frozen=True)
class Topology:
    """Ranks of a tensor group, layers of each stage, and whether a rank holds whole experts."""

    tensor: int
    partition: tuple[int, ...]
    expert_parallel: bool

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Read `4:20,20` or `8:40:ep`. Raises ValueError on another form."""
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*(?:,[1-9]\d*)*)(:ep)?", text)
        if not match:
            raise ValueError(f"{text!r} is no topology")
        return cls(int(match[1]), tuple(map(int, match[2].split(","))), bool(match[3]))

    @property
    def cards(self) -> int:
        return self.tensor * len(self.partition)

    def options(self) -> dict:
        """Engine keywords."""
        return {"tensor_parallel_size": self.tensor, "pipeline_parallel_size": len(self.partition),
                "enable_expert_parallel": self.expert_parallel,
                "worker_extension_cls": "benchmarks.drawn_weights.Holder"}  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, self.partition))} if len(self.partition) > 1 else {}


def continued(llm, vocabulary: int, lengths: list[int]) -> list[list[dict]]:
    """Greedy tokens after prompts of these lengths, each alone: of each step {token: log-probability}, the best first."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=CONTINUED, ignore_eos=True, detokenize=False, logprobs=BEST)
    found = []
    for length in lengths:
        drawn = random.Random(length)
        prompt = [drawn.randrange(5, vocabulary) for _ in range(length)]
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        steps = [{str(token): entry.logprob for token, entry in step.items()} for step in answer.outputs[0].logprobs]
        found.append([dict(sorted(step.items(), key=lambda item: -item[1])) for step in steps])
    return found


def parting(ours: list[dict], first: list[dict]) -> tuple[int, float]:
    """Steps until greedy tokens differ, and by how much `first` holds its token for better than the other: 0.0 if none does."""
    for step, (mine, theirs) in enumerate(zip(ours, first, strict=True)):
        token, other = next(iter(theirs)), next(iter(mine))
        if token != other:
            return step, theirs[token] - theirs.get(other, min(theirs.values()))
    return len(ours), 0.0


def child(folder: Path, topology: Topology, options: dict, points: list, prompts: list[int]) -> None:
    """One engine: load, continue the prompts, measure the points twice, print JSON."""
    from vllm import LLM

    llm = LLM(model=str(folder), **options | topology.options())
    vocabulary = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    found = {"held_bytes": llm.collective_rpc("held_bytes"), "continued": continued(llm, min(vocabulary, 4_000), prompts)}
    for requests, context in points:
        measure(llm, requests, context)
        found[f"bs{requests}-ctx{context}"] = measure(llm, requests, context)
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)


def planned(config: dict, topology: Topology, inventory: Inventory, pool_bytes: int) -> dict:
    """What the planner says: "weights_bytes" of a rank of each stage, "cache_tokens", "step_ms" of a decode step by requests."""
    spec = ModelSpec.from_config(config)
    table, cut = WeightTable(spec, expected_tensors(config)), stages(spec, topology.partition)
    weights = [table.rank(stage, topology.tensor, topology.expert_parallel, False, False) for stage in cut]
    kv = KvBlocks(spec, 0, (len(cut) + 1) * OPTIONS["max_num_batched_tokens"])
    blocks = min(pool_bytes // kv.block_bytes(stage) for stage in cut)
    layout = inventory, topology.tensor, topology.expert_parallel
    return {
        "weights_bytes": [each.total for each in weights],
        "cache_tokens": kv.capacity_tokens(blocks, OPTIONS["max_model_len"]),
        "step_ms": {n: decode_step(spec, cut, weights, *layout, n, False, 256).total for n, context in POINTS if context == 256},
    }


def figures_of(found: dict[str, dict], plans: dict[str, dict]) -> list[dict]:
    """Figures of every topology, beside the planner's and the first topology's."""
    figures, first = [], next(iter(found))

    def note(name: str, value: float, unit: str, digits: int = 3) -> None:
        figures.append({"id": f"topologies/{name}", "value": round(value, digits), "unit": unit})

    for name, seen in found.items():
        plan = plans[name]
        share = len(seen["held_bytes"]) // len(plan["weights_bytes"])
        over = [held / plan["weights_bytes"][rank // share] for rank, held in enumerate(seen["held_bytes"])]
        note(f"{name}/weights-gib", max(seen["held_bytes"]) / GIB, "GiB")
        note(f"{name}/weights-over-planned", max(over, key=lambda ratio: abs(ratio - 1)), "x", 4)
        note(f"{name}/cache-tokens", seen["cache_tokens"], "tokens", 0)
        note(f"{name}/cache-tokens-over-planned", seen["cache_tokens"] / plan["cache_tokens"], "x", 4)
        partings = [parting(*pair) for pair in zip(seen["continued"], found[first]["continued"], strict=True)]
        note(f"{name}/tokens-as-{first}", statistics.mean(step / CONTINUED for step, _ in partings), "share until they part")
        note(f"{name}/parted-by", max(gap for _, gap in partings), "nats")
        for requests, context in POINTS:
            point, other = (engine[f"bs{requests}-ctx{context}"] for engine in (seen, found[first]))
            place = f"bs{requests}-ctx{label(context)}"
            note(f"{name}/{place}/token", point["token_s"] * 1e3, "ms")
            note(f"{name}/{place}/over-{first}", point["token_s"] / other["token_s"], "x the time")
            if context == 256:
                step_ms, first_ms = (each["step_ms"][requests] for each in (plan, plans[first]))
                note(f"{name}/{place}/planned", step_ms, "ms")
                note(f"{name}/{place}/planned-over-{first}", step_ms / first_ms, "x the time")
            note(f"{name}/{place}/prefill-rate", requests * context / point["prefill_s"], "tokens/s", 0)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="receipt to write")
    parser.add_argument("--topologies", nargs="+", metavar="TENSOR:LAYERS[:ep]", default=DEFAULT)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, Topology.parse(arguments.name), OPTIONS, POINTS, PROMPTS)
    if not arguments.output:
        parser.error("--output says where the receipt goes")
    try:
        topologies = {text: Topology.parse(text) for text in arguments.topologies}
    except ValueError as error:
        parser.error(f"{error}: write 8:40, 8:40:ep or 4:20,20")
    import torch

    if wrong := [text for text, each in topologies.items() if sum(each.partition) != FULL["num_hidden_layers"]]:
        parser.error(f"{wrong[0]} does not deal out {FULL['num_hidden_layers']} layers")
    here, needed = torch.cuda.device_count(), max(each.cards for each in topologies.values())
    if needed > here:
        sys.exit(f"error: {needed} cards are needed, {here} are here\nhint: name smaller topologies, as --topologies 2:20,20")
    card = torch.cuda.get_device_properties(0)
    believed = {} if (card.major, card.minor) < (8, 9) else {"VLLM_AMPERE_ASSUME": "sm80"}
    found, plans = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_checkpoint.describe(Path(folder), tiny_config.resolve(PRESET, FULL))
        inventory = Inventory(cards=here, card_gib=card.total_memory / GIB, link="nvlink")
        for text, topology in topologies.items():
            plans[text] = planned(config, topology, inventory, OPTIONS["kv_cache_memory_bytes"])
            found |= run_engines(Path(folder), __file__, {text: believed | topology.environment()})
            log = (Path(folder) / f"{text}.log").read_text()
            found[text]["cache_tokens"] = min(int(n.replace(",", "")) for n in CACHE_TOKENS.findall(log))
            print(f"{text}: done", file=sys.stderr)
    figures = figures_of(found, plans)
    scope = "sm_80 code on the cards named; the whole model with drawn weights and small engram tables"
    said = "greedy tokens beside the first topology's, in this run"
    receipt.write(arguments.output, "topologies", scope, said, figures, found | {"planned": plans})
    for figure in figures:
        print(f"{figure['value']:>14}  {figure['unit']:<10} {figure['id']}")


if __name__ == "__main__":
    main()
