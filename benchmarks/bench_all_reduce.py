# SPDX-License-Identifier: Apache-2.0
"""All-reduce times of NCCL and of vLLM's own kernel on the cards at hand, beside the planner's latency model.

    python benchmarks/bench_all_reduce.py --output FILE [--cards 2]

10 KB is one token's hidden vector. Each call is captured many times into one CUDA graph, as a decode step holds it. The
model is given twice: with the constants that the planner ships for NVLink, and fitted to NCCL's times of this run as
`vllm-ampere plan --probe` does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import receipt  # noqa: E402
from vllm.ampere.planner.inventory import LINKS, LinkKind, Sample  # noqa: E402
from vllm.ampere.planner.latency import all_reduce_us  # noqa: E402
from vllm.ampere.planner.probe import fit  # noqa: E402

SIZES = tuple(10 << shift for shift in (10, 11, 12, 13, 14, 15, 16)) + (1 << 20,)
LIMIT_S = 300


def child(folder: Path) -> None:
    """One process a card: every size with both, and whether the sums are right; the first writes them."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    from vllm.ampere.planner.link_timing import Cards

    cards = Cards("cuda", int(os.environ["LOCAL_WORLD_SIZE"]))
    everyone = dist.new_group(backend="nccl")
    own = CustomAllreduce(dist.new_group(backend="gloo"), cards.device)
    found = {"own_kernel": not own.disabled, "nccl": {}, "vllm": {}}
    for nbytes in SIZES:
        found["nccl"][nbytes] = cards.all_reduce(nbytes, everyone)
        if own.disabled:
            continue
        values = torch.full((nbytes // 2,), cards.rank + 1.0, dtype=torch.bfloat16, device=cards.device)
        want = sum(range(1, dist.get_world_size() + 1))
        call = partial(own.custom_all_reduce, values)
        if not call().eq(want).all():
            raise ValueError(f"{nbytes} bytes: a wrong sum")
        found["vllm"][nbytes] = cards.microseconds(call, nbytes, everyone, own.capture)
    if cards.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def samples_of(times: dict[str, float], cards: int) -> list[Sample]:
    return [Sample(what="all-reduce", link=LinkKind.NVLINK, cards=cards, nbytes=int(n), us=us) for n, us in times.items()]


def figures_of(found: dict, cards: int) -> list[dict]:
    """Times, and the model's over NCCL's and over the kernel's."""
    figures = []
    models = {"shipped": LINKS[LinkKind.NVLINK], "fitted": fit(samples_of(found["nccl"], cards))}
    for nbytes in map(str, SIZES):
        name = f"all_reduce/{cards}x{int(nbytes) >> 10}KiB"
        for what in ("nccl", "vllm"):
            if nbytes in found[what]:
                figures.append({"id": f"{name}/{what}-time", "value": round(found[what][nbytes], 2), "unit": "us"})
        for label, link in models.items():
            us = all_reduce_us(link, cards, int(nbytes))
            figures.append({"id": f"{name}/model-{label}", "value": round(us, 2), "unit": "us"})
            for what in ("nccl", "vllm"):
                if nbytes in found[what]:
                    ratio = round(us / found[what][nbytes], 3)
                    figures.append({"id": f"{name}/model-{label}-over-{what}", "value": ratio, "unit": "x"})
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="receipt to write")
    parser.add_argument("--cards", type=int, default=2)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)
    if not arguments.output:
        parser.error("--output says where the receipt goes")
    import torch

    if torch.cuda.device_count() < arguments.cards:
        sys.exit(f"error: {arguments.cards} cards are needed, {torch.cuda.device_count()} are here")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={arguments.cards}", __file__, "--child", folder]
        ended = subprocess.run(command, timeout=LIMIT_S)
        if ended.returncode:
            sys.exit(f"error: the measurement ended with {ended.returncode}")
        found = json.loads(Path(folder, "found.json").read_text())
    figures = figures_of(found, arguments.cards)
    scope = "NCCL through PyTorch, and vLLM's custom all-reduce as built for the card at hand"
    receipt.write(arguments.output, "all-reduce", scope, "each sum of vLLM's kernel is checked first", figures, found)
    if not found["own_kernel"]:
        print("vLLM's own kernel does not run here: its log says why", file=sys.stderr)
    for figure in figures:
        print(f"{figure['value']:>12}  {figure['unit']:<4} {figure['id']}")


if __name__ == "__main__":
    main()
