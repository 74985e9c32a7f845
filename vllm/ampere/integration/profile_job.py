# SPDX-License-Identifier: Apache-2.0
"""Script of `vllm-ampere profile --model`: one engine, a prefill and some decode steps under torch's profiler.

    python -m vllm.ampere.integration.profile_job JSON, of the keys that `cli.profile` writes
"""

import json
import os
import random
import sys

# Decode steps before those that count: asynchronous scheduling has filled its pipe by then.
WARM_STEPS = 5


def serve(llm, requests: int, context: int, steps: int, name: str = "", profiled: bool = True) -> None:
    """All requests from prompt to last token.

    Args:
        llm: vLLM's engine, with a `profiler_config`.
        requests: how many.
        context: tokens of each prompt.
        steps: decode steps that are looked at.
        name: what the names of its requests and traces begin with.
        profiled: prefill and decode steps leave a trace each, "{name}prefill" and "{name}decode".
    """
    from vllm import SamplingParams

    engine, drawn = llm.llm_engine, random.Random(name)
    sampling = SamplingParams(
        temperature=0, max_tokens=8 * (steps + 2 * WARM_STEPS), ignore_eos=True, detokenize=False
    )
    identifiers = [f"{name}{number}" for number in range(requests)]
    if profiled:
        llm.start_profile(f"{name}prefill")
    for identifier in identifiers:
        prompt = [drawn.randrange(5, 500) for _ in range(context)]
        engine.add_request(identifier, {"prompt_token_ids": prompt}, sampling)
    answered = set()
    while len(answered) < len(identifiers):
        answered |= {output.request_id for output in engine.step()}
    if profiled:
        llm.stop_profile()
    for _ in range(WARM_STEPS):
        engine.step()
    if profiled:
        llm.start_profile(f"{name}decode")
    for _ in range(steps):
        engine.step()
    if profiled:
        llm.stop_profile()
    engine.abort_request(identifiers)
    while engine.has_unfinished_requests():
        engine.step()


def profiler(folder: str, stacks: bool = False) -> dict:
    """vLLM's `profiler_config` that writes traces into a folder, with Python frames or without."""
    return {
        "profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": stacks, "ignore_frontend": True,
    }  # fmt: skip


def main(job: dict) -> None:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="engine arguments"))
    asked = parser.parse_args(["--model", job["model"], *job["arguments"]])
    # On the CPU operators have no names of ours: frames tell whose they are.
    stacks = job["stacks"] or current_platform.is_cpu()
    llm = LLM(**vars(EngineArgs.from_cli_args(asked)) | {"profiler_config": profiler(job["folder"], stacks)})
    sizes = job["requests"], job["context"], job["steps"]
    serve(llm, *sizes, name="warm-", profiled=False)
    serve(llm, *sizes)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads take seconds to end, and the traces are written
