# SPDX-License-Identifier: Apache-2.0
"""Step times of one rank of TP8, all 40 layers, without collectives and without real weights.

    python benchmarks/bench_rank_slice.py --output FILE [--modes native sm80] [--dspark] [--traces DIR]

The checkpoint is a config.json whose widths are a rank's share and whose weights are drawn on the card. Engram tables
are left out: they belong to the host. Each mode is an engine of its own; both load side by side, and once both have they are
measured one at a time. A point is (requests, context tokens): every request prefills its own prompt, then all decode together. Each is
run twice, `LONG_POINTS` once, and the last run counts. With --dspark five drafts a step are made and verified, at
`DSPARK_POINTS`. With --traces `TRACED` points then run once more under torch's profiler; DIR keeps what it wrote, and the
receipt what `vllm-ampere profile` reads in it.
"""

import argparse
import dataclasses
import fcntl
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import receipt  # noqa: E402

TENSOR_PARALLEL = 8
POINTS = [(1, 256), (8, 256), (32, 256), (1, 16_384), (8, 16_384), (1, 65_536)]
# Their prefill takes up to a minute; they run once, since the points before them have met their kernels.
LONG_POINTS = [(8, 65_536), (32, 65_536)]
DSPARK_POINTS = [(1, 256), (8, 256), (32, 256)]
# Once more behind all others, under the profiler.
TRACED = [(1, 256), (1, 16_384), (32, 256)]
TRACED_DSPARK = [(1, 256), (8, 256)]
TRACED_STEPS = 10
DSPARK = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}}
DECODE_TOKENS = 48
# A share of the released model: heads, output groups, expert width and vocabulary are cut, hidden size and layers are not.
SHARE = {
    "vocab_size": 129_280 // TENSOR_PARALLEL // 128 * 128,
    "hidden_size": 5_120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64 // TENSOR_PARALLEL,
    "q_lora_rank": 1_280,
    "o_lora_rank": 1_024,
    "o_groups": 8 // TENSOR_PARALLEL,
    "moe_intermediate_size": 2_304 // TENSOR_PARALLEL,
    "n_routed_experts": 384,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2_048,
    "engram_layer_ids": [],
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_noise_token_id": 3_000,
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
}
OPTIONS = {
    "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 70_000, "max_num_seqs": 32, "max_num_batched_tokens": 8_192,
    "kv_cache_memory_bytes": 12 << 30, "gpu_memory_utilization": 0.3, "limit_mm_per_prompt": {"image": 0},
    "enable_prefix_caching": False, "seed": 0,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
}

# vLLM's line of each worker: weights, with the draft's.
LOADED = re.compile(r"Model loading took ([\d.]+) GiB")


def write_config(folder: Path) -> None:
    """config.json of the rank's share."""
    from vllm.ampere.testing import tiny_config

    recipe = tiny_config.resolve("sharp", SHARE)
    (folder / "config.json").write_text(json.dumps(tiny_config.build_config(recipe, 4_096)))


def fill(parameter, low=None, high=None, seed=0, name="") -> None:
    """Values of a sensible size in place of the dummy loader's, whose logits would all be equal."""
    import torch

    raw = parameter.data
    if raw.device.type == "meta" or not raw.numel():
        return
    generator = torch.Generator(raw.device).manual_seed(raw.numel() + len(name))
    if raw.dtype == torch.float8_e8m0fnu or (raw.dtype == torch.uint8 and "scale" in name):
        raw.view(torch.uint8).fill_(121 if raw.ndim == 3 else 122)
    elif raw.dtype in (torch.uint8, torch.int8):
        raw.view(torch.uint8).random_(0, 256, generator=generator)
    elif raw.dtype == torch.float8_e4m3fn:
        raw.view(torch.uint8).random_(0, 0x7E, generator=generator)
    elif torch.is_floating_point(raw):
        width = raw.shape[-1] ** -0.5 if raw.ndim > 1 else 0.1
        raw.copy_((torch.randn(raw.shape, device=raw.device, generator=generator) * width + (raw.ndim == 1)).to(raw.dtype))


def measure(llm, requests: int, context: int) -> dict:
    """Prefill seconds, seconds between answers of a step once every request decodes, and seconds a token of each request.

    Over pipeline stages the requests may be in two batches, each of which answers by itself: the last is what compares.
    """
    from vllm import SamplingParams

    engine = llm.llm_engine
    drawn = random.Random(f"{requests}/{context}")
    # The first request decodes while the others prefill.
    # Each draft may be right.
    drafts = engine.vllm_config.num_speculative_tokens
    limit = DECODE_TOKENS * (1 + drafts) + requests * context // OPTIONS["max_num_batched_tokens"]
    sampling = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    for number in range(requests):
        tokens = [drawn.randrange(5, 4_000) for _ in range(context)]
        engine.add_request(f"{requests}-{context}-{number}", {"prompt_token_ids": tokens}, sampling)
    counts, ends, tokens, prefill_s = {}, [], [], None
    while engine.has_unfinished_requests():
        outputs = engine.step()
        for output in outputs:
            counts[output.request_id] = len(output.outputs[0].token_ids)
        if outputs and len(counts) == requests:
            prefill_s = prefill_s or time.perf_counter() - start
            if max(counts.values()) < limit:
                ends.append(time.perf_counter())
                tokens.append(sum(counts.values()))
    token_s = (ends[-1] - ends[4]) / (tokens[-1] - tokens[4]) * requests
    return {"prefill_s": prefill_s, "steps_s": [b - a for a, b in zip(ends[4:], ends[5:])], "token_s": token_s}


def held(worker) -> dict[str, float]:
    """GiB of the parameters and buffers of a worker's model and draft, by name, the numbers in it left out."""
    runner, found, seen = worker.model_runner, {}, set()
    for model in (runner.get_model(), runner.get_draft_model()):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()] if model else ():
            if tensor.is_cuda and tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                kind = re.sub(r"\d+", "*", name)
                found[kind] = found.get(kind, 0) + tensor.untyped_storage().nbytes() / 2**30
    return found


def wait_for_all(folder: Path) -> None:
    """Say that this engine is loaded, and wait for the others: one that loads beside it disturbs what is measured."""
    (folder / f"loaded-{os.getpid()}").touch()
    while len(list(folder.glob("loaded-*"))) < int((folder / "engines").read_text()):
        time.sleep(0.2)


def traced_stages(llm, folder: Path, points: list) -> dict:
    """What the profiler saw of each point's prefill and decode: {"bs1-ctx256-decode": a summary, ...}."""
    from vllm.ampere import profiler
    from vllm.ampere.integration import profile_job

    for requests, context in points:
        profile_job.serve(llm, requests, context, TRACED_STEPS, f"bs{requests}-ctx{label(context)}-")
    read = profiler.read(profiler.find_traces(folder))
    # What stands behind the underscore is the rank.
    return {re.sub("_.*", "", each.trace): dataclasses.asdict(each) for each in read}


def child(
    folder: Path, options: dict, after: Callable = lambda llm: None, points: list = POINTS, traces: Path | None = None,
    traced: list = TRACED,
) -> None:  # fmt: skip
    """One engine: load, wait for the card to be free, measure every point, print JSON.

    Args:
        folder: with the config.json; engines that share it take turns.
        options: engine keywords on top of `OPTIONS`.
        after: called with the engine behind each point; what it returns is in the point's `extra`.
        points: (requests, context tokens) each.
        traces: folder for the traces of `traced` points; None: none are taken.
    """
    from vllm import LLM
    from vllm.model_executor.model_loader import dummy_loader

    from vllm.ampere.integration import profile_job

    dummy_loader.initialize_single_dummy_weight = fill
    if traces:
        options = options | {"profiler_config": profile_job.profiler(str(traces))}
    start = time.perf_counter()
    llm = LLM(model=str(folder), **OPTIONS | options)
    found = {"load_s": time.perf_counter() - start}
    if traces:
        found["held_gib"] = llm.collective_rpc(held)[0]
    wait_for_all(folder)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        measure(llm, 2, 600)
        after(llm)
        for requests, context in points:
            if (requests, context) not in LONG_POINTS:
                measure(llm, requests, context)  # upstream compiles kernels at the first step of a size
                after(llm)
            found[f"bs{requests}-ctx{context}"] = measure(llm, requests, context) | {"extra": after(llm)}
        if traces:
            try:
                found["traces"] = traced_stages(llm, traces, traced)
            except Exception as error:  # what was measured is worth more than its traces
                found["traces_failed"] = f"{type(error).__name__}: {error}"
    print("RESULT " + json.dumps(found), flush=True)
    os._exit(0)


def points_of(drafts: bool, short: bool = False) -> list[tuple[int, int]]:
    return DSPARK_POINTS if drafts else POINTS if short else POINTS + LONG_POINTS


def label(context: int) -> str:
    return str(context) if context < 1_024 else f"{context // 1_024}k"


def figures_of(found: dict[str, dict], modes: list[str], dspark: bool, short: bool = False) -> list[dict]:
    """Figures of every mode, and its times over the first mode's: `vs-stock` where that is upstream's own path."""
    first, figures = modes[0], []
    versus = "vs-stock" if first == "native" else f"vs-{first}"

    def note(name: str, value: float, unit: str) -> None:
        figures.append({"id": f"rank_slice_tp8/{name}", "value": value, "unit": unit})

    for mode in modes:
        gib = found[mode]["weights_gib"]
        note(f"load/{mode}-weights-gib", gib, "GiB")
        if "held_gib" in found[mode]:
            note(f"load/{mode}-tensors-gib", round(sum(found[mode]["held_gib"].values()), 2), "GiB")
        if dspark and mode != "native":
            note("load/weights-gib", gib, "GiB")
        for requests, context in points_of(dspark, short):
            seen, other = (found[each][f"bs{requests}-ctx{context}"] for each in (mode, first))
            step_s, other_s = (statistics.median(each["steps_s"]) for each in (seen, other))
            step = f"{'dspark' if dspark else 'decode'}-bs{requests}-ctx{label(context)}"
            note(f"{step}/{mode}-step", round(step_s * 1e3, 3), "ms")
            if mode != first:
                note(f"{step}/{versus}", round(step_s / other_s, 3), "x the time")
            if dspark:
                continue
            prefill = f"prefill-{'' if requests == 1 else f'bs{requests}-'}{label(context)}"
            note(f"{prefill}/{mode}-rate", round(requests * context / seen["prefill_s"]), "tokens/s")
            if mode != first:
                note(f"{prefill}/{versus}", round(seen["prefill_s"] / other["prefill_s"], 3), "x the time")
        for trace, seen in found[mode].get("traces", {}).items():
            point, _, part = trace.rpartition("-")
            launches = sum(row["calls"] or 0 for row in seen["rows"])
            part = "dspark" if dspark and part == "decode" else part
            note(f"{part}-{point}/{mode}-launches", round(launches / max(1, seen["steps"]), 1), "per step")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="receipt to write")
    parser.add_argument("--modes", nargs="+", default=["native", "sm80"], choices=["native", "sm80", "sm86"])
    parser.add_argument("--dspark", action="store_true", help="with the draft model")
    parser.add_argument("--short", action="store_true", help="without the points that take longest")
    parser.add_argument("--traces", type=Path, help="folder for traces of the profiler")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        drafts = arguments.name.endswith("-dspark")
        traces = arguments.traces / arguments.name if arguments.traces else None
        return child(arguments.child, DSPARK if drafts else {}, points=points_of(drafts, arguments.short), traces=traces,
                     traced=TRACED_DSPARK if drafts else TRACED)  # fmt: skip
    if not arguments.output:
        parser.error("--output says where the receipt goes")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder))
        suffix = "-dspark" if arguments.dspark else ""
        modes = {mode + suffix: {} if mode == "native" else {"VLLM_AMPERE_ASSUME": mode} for mode in arguments.modes}
        more = ["--short"] * arguments.short + (["--traces", str(arguments.traces)] if arguments.traces else [])
        found = run_engines(Path(folder), __file__, modes, more)
    found = {name.removesuffix(suffix): seen for name, seen in found.items()}
    figures = figures_of(found, arguments.modes, arguments.dspark, arguments.short)
    receipt.write(arguments.output, "rank-slice", "sm_80 code on H200 where the mode is sm80; upstream's own kernels where it is native",
                  "tests/gpu/engine of the same commit; the weights here are random", figures, found)
    for figure in figures:
        print(f"{figure['value']:>12}  {figure['unit']:<12} {figure['id']}")


def run_engines(folder: Path, script: str, engines: dict[str, dict], more: Sequence[str] = ()) -> dict[str, dict]:
    """Name -> what the child of `script` measured.

    Args:
        folder: with the config.json.
        engines: name -> environment of its child, which is called with `--child FOLDER --name NAME` and `more`. Compiled kernels go
            below `TRITON_CACHE_DIR`, if there is one, and else into the folder.
    """
    (folder / "engines").write_text(str(len(engines)))
    for left in folder.glob("loaded-*"):
        left.unlink()
    children, caches = {}, Path(os.environ.get("TRITON_CACHE_DIR", folder))
    for name, variables in engines.items():
        env = {"TRITON_CACHE_DIR": str(caches / f"triton-{variables.get('VLLM_AMPERE_ASSUME', 'native')}")} | variables
        log = open(folder / f"{name}.log", "w+")
        command = [sys.executable, script, "--child", str(folder), "--name", name, *more]
        children[name] = subprocess.Popen(command, env=os.environ | ENVIRONMENT | env, stdout=log, stderr=subprocess.STDOUT), log
    try:
        while all(process.poll() is None for process, _ in children.values()):
            time.sleep(0.5)
    except KeyboardInterrupt:
        for name, (process, log) in children.items():
            process.kill()
            log.seek(0)
            print(f"{name}:\n" + "\n".join(log.read().splitlines()[-20:]))
        raise
    failed = any(process.poll() for process, _ in children.values())
    found = {}
    for name, (process, log) in children.items():
        if failed and process.poll() is None:
            process.kill()
        process.wait()
        log.seek(0)
        lines = log.read().splitlines()
        results = [line for line in lines if line.startswith("RESULT ")]
        if not results:
            sys.exit(f"error: the {name} engine ended with {process.returncode}:\n" + "\n".join(lines[-60:]))
        found[name] = json.loads(results[0].removeprefix("RESULT "))
        found[name]["weights_gib"] = sum(float(each) for line in lines for each in LOADED.findall(line))
    return found


if __name__ == "__main__":
    main()
