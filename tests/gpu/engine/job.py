# SPDX-License-Identifier: Apache-2.0
"""Script: one engine in process, a list of steps, and what each gave.

    python job.py FILE, a JSON {"checkpoint": DIR, "options": {...}, "steps": [...], "output": FILE, "shadow": ""}

A step is {"name": ..., "prompts": [[token ids], ...], "max_tokens": N} with, if wanted, "prompt_logprobs": true,
"logprobs": how many of the best to keep in place of the whole vocabulary, "images": [[width, height, seed], ...] (one
before each prompt, which is then text), or "caches": true (bytes of every cache after every engine step).
Its prompts run at once. The file is a dict: step name -> list of answers, one a prompt, in `answers`;
the difference of the engine's counters in `counters`; seconds to start in `startup_s`.
"""

import json
import os
import sys
import time
from pathlib import Path

START = time.monotonic()
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch


def rows(steps, kept: int) -> torch.Tensor:
    """float32 [tokens, vocabulary] of log-probabilities from the engine's mappings, or the `kept` best, sorted."""
    if kept > 0:
        return torch.tensor([sorted((entry.logprob for entry in step.values()), reverse=True)[:kept] for step in steps])
    out = torch.full((len(steps), len(steps[0])), torch.nan)
    for row, step in zip(out, steps):
        row[list(step)] = torch.tensor([entry.logprob for entry in step.values()])
    return out


def answer(output, step) -> dict:
    generated, kept = output.outputs[0], step.get("logprobs", -1)
    found = {"tokens": list(generated.token_ids), "cached_tokens": output.num_cached_tokens or 0,
             "prompt_tokens": len(output.prompt_token_ids), "logprobs": rows(generated.logprobs, kept) if generated.logprobs else None}
    if step.get("prompt_logprobs"):
        found["prompt_logprobs"] = rows(output.prompt_logprobs[1:], kept)
    return found


def prompts_of(step) -> list[dict]:
    if "images" not in step:
        return [{"prompt_token_ids": ids} for ids in step["prompts"]]
    import numpy
    from PIL import Image

    def picture(width, height, seed):
        return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8))

    return [{"prompt": text, "multi_modal_data": {"image": picture(*size)}} for text, size in zip(step["prompts"], step["images"])]


def counters(llm) -> dict[str, float]:
    totals: dict[str, float] = {}
    for metric in llm.get_metrics():
        if hasattr(metric, "value"):
            totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
    return totals


def caches(llm, step, params) -> list[dict]:
    from tests.e2e.cache_snapshots import steps_of

    return steps_of(llm, step["prompts"], params, llm.llm_engine.vllm_config.speculative_config is not None)


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams

    if job.get("shadow"):
        from tests.gpu.engine import shadow

        getattr(shadow, job["shadow"])()
    llm = LLM(model=job["checkpoint"], **job["options"])
    result = {"startup_s": time.monotonic() - START, "answers": {}, "counters": {}, "caches": {}, "seconds": {}}
    for step in job["steps"]:
        params = SamplingParams(
            temperature=0, max_tokens=step["max_tokens"], ignore_eos=True, detokenize=False,
            logprobs=step.get("logprobs", -1), prompt_logprobs=step.get("logprobs", -1) if step.get("prompt_logprobs") else None,
        )
        before, start = counters(llm), time.monotonic()
        if step.get("caches"):
            result["caches"][step["name"]] = caches(llm, step, params)
        else:
            outputs = llm.generate(prompts_of(step), params, use_tqdm=False)
            result["answers"][step["name"]] = [answer(output, step) for output in outputs]
        result["seconds"][step["name"]] = time.monotonic() - start
        after = counters(llm)
        result["counters"][step["name"]] = {name: after[name] - before.get(name, 0.0) for name in after}
        print(f"STEP {step['name']} {result['seconds'][step['name']]:.1f} s", flush=True)
        torch.save(result, job["output"])
    if job.get("shadow"):
        result["shadow"] = shadow.FOUND
        torch.save(result, job["output"])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads take seconds to end, and the result is written
