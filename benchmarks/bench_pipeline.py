# SPDX-License-Identifier: Apache-2.0
"""The 40-layer rank slice on one card and as two stages on two: token, prefill, bubble and bytes over the link.

    python benchmarks/bench_pipeline.py --output FILE [--partitions 20,20 14,26]

Model, points and clock are those of `bench_rank_slice.py`. All engines run the same code (sm_80 on a newer card), load
side by side and are measured one at a time. One card's time for the same layers is the work; a bubble is the share
of two cards' time beyond it, so hops and the launch of two workers are in it. Bytes are held against the planner's.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import receipt  # noqa: E402
from benchmarks.bench_rank_slice import OPTIONS, POINTS, child, label, run_engines, write_config  # noqa: E402
from vllm.ampere.model_spec import ModelSpec  # noqa: E402
from vllm.ampere.pipeline_cut import CANDIDATES, LATENT  # noqa: E402
from vllm.ampere.planner.pipeline import crossing_bytes, payload_bytes  # noqa: E402

ONE_CARD = "40"
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def options_of(partition: str) -> dict:
    """Engine keywords of a partition."""
    stages = len(partition.split(","))
    return {"pipeline_parallel_size": stages, "worker_extension_cls": "benchmarks.pipeline_worker.LinkCounter"}


def spec_of(folder: Path) -> ModelSpec:
    return ModelSpec.from_config(json.loads((folder / "config.json").read_text()))


def link_bytes(spec: ModelSpec, start: int, sent: list[dict], requests: int, context: int) -> dict[str, float]:
    """Bytes that crossed before layer `start`, and over what the planner counts: for the rows of each step, and for a
    decode step of `requests` tokens, which a captured graph may pad."""
    totals, counted = [], 0
    for step in sent:
        kept = step["hidden_states"][0]
        rows = step[LATENT][0] if LATENT in step else kept
        counted += sum(payload_bytes(spec, start, False, rows, kept, None if CANDIDATES in step else 1).values())
        totals.append(sum(nbytes for _, nbytes in step.values()))
    decode = max(totals[-8:])
    return {"bytes": sum(totals), "bytes-over-planned": sum(totals) / counted, "decode-bytes": decode,
            "decode-bytes-over-planned": decode / crossing_bytes(spec, start, False, requests, requests, context)}


def figures_of(spec: ModelSpec, found: dict[str, dict]) -> list[dict]:
    """Figures of every partition, and beside one card."""
    figures = []

    def note(name: str, value: float, unit: str, digits: int = 3) -> None:
        figures.append({"id": f"rank_slice_pp2/{name}", "value": round(value, digits), "unit": unit})

    for partition, seen in found.items():
        for requests, context in POINTS:
            point, one = (engine[f"bs{requests}-ctx{context}"] for engine in (seen, found[ONE_CARD]))
            name = f"{partition}/bs{requests}-ctx{label(context)}"
            note(f"{name}/token", point["token_s"] * 1e3, "ms")
            note(f"{name}/prefill-rate", requests * context / point["prefill_s"], "tokens/s", 0)
            if partition == ONE_CARD:
                continue
            note(f"{name}/token-beyond-one-card", (point["token_s"] - one["token_s"]) * 1e3, "ms")
            for what, key in (("decode", "token_s"), ("prefill", "prefill_s")):
                note(f"{name}/{what}-bubble", 1 - one[key] / (2 * point[key]), "share")
            start = int(partition.split(",")[0])
            for what, value in link_bytes(spec, start, point["extra"][0], requests, context).items():
                note(f"{name}/{what}", value, "x" if what.endswith("planned") else "bytes")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="receipt to write")
    parser.add_argument("--partitions", nargs="+", default=["20,20", "14,26"], help="layers of the two stages")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, options_of(arguments.name), lambda llm: llm.collective_rpc("take_sent"))
    if not arguments.output:
        parser.error("--output says where the receipt goes")
    import torch

    if torch.cuda.device_count() < 2:
        sys.exit(f"error: two cards are needed, {torch.cuda.device_count()} are here")
    believed = {} if torch.cuda.get_device_capability() < (8, 9) else {"VLLM_AMPERE_ASSUME": "sm80"}
    engines = {ONE_CARD: SPAWN | believed}
    for partition in arguments.partitions:
        engines[partition] = SPAWN | believed | {"VLLM_PP_LAYER_PARTITION": partition}
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        spec = spec_of(Path(folder))
        found = run_engines(Path(folder), __file__, engines)
    figures = figures_of(spec, found)
    scope = "sm_80 code on the cards named; one rank's share of TP8 without its tensor group; weights are random"
    receipt.write(arguments.output, "pipeline", scope, "tests/gpu/engine/test_two_cards.py of the same commit", figures, found)
    for figure in figures:
        print(f"{figure['value']:>14}  {figure['unit']:<9} {figure['id']}")


if __name__ == "__main__":
    main()
