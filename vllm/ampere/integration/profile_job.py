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


def _serve(llm, job: dict, name: str, profiled: bool) -> None:
    """All requests from prompt to last token; their prefill and `steps` decode steps leave a trace each."""
    from vllm import SamplingParams

    engine, drawn = llm.llm_engine, random.Random(name)
    sampling = SamplingParams(
        temperature=0, max_tokens=8 * (job["steps"] + 2 * WARM_STEPS), ignore_eos=True, detokenize=False
    )
    identifiers = [f"{name}-{number}" for number in range(job["requests"])]
    if profiled:
        llm.start_profile("prefill")
    for identifier in identifiers:
        prompt = [drawn.randrange(5, 500) for _ in range(job["context"])]
        engine.add_request(identifier, {"prompt_token_ids": prompt}, sampling)
    answered = set()
    while len(answered) < len(identifiers):
        answered |= {output.request_id for output in engine.step()}
    if profiled:
        llm.stop_profile()
    for _ in range(WARM_STEPS):
        engine.step()
    if profiled:
        llm.start_profile("decode")
    for _ in range(job["steps"]):
        engine.step()
    if profiled:
        llm.stop_profile()
    engine.abort_request(identifiers)
    while engine.has_unfinished_requests():
        engine.step()


def main(job: dict) -> None:
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="engine arguments"))
    asked = parser.parse_args(["--model", job["model"], *job["arguments"]])
    options = vars(EngineArgs.from_cli_args(asked)) | {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": job["folder"],
            # On the CPU operators have no names of ours: frames tell whose they are.
            "torch_profiler_with_stack": job["stacks"] or current_platform.is_cpu(),
            "ignore_frontend": True,
        },
    }
    llm = LLM(**options)
    _serve(llm, job, "warm", False)
    _serve(llm, job, "profiled", True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # the engine's threads take seconds to end, and the traces are written
