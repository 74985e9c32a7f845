# SPDX-License-Identifier: Apache-2.0
"""Script: serve a tiny checkpoint in process and print which of our kernels a card would have compiled.

    python served_kernels.py '{"checkpoint": DIR, "options": {...}, "prompts": [[...], ...], "max_tokens": N}'

Prints JSON: "served", the keys of all launches while requests ran, "warmed", those of the warm-up's calls, and
"kept_streams", the shape of the streams that the model keeps for a draft, or null.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm.ampere.testing.specialization import recorded_ops


def main(job: dict) -> None:
    from vllm import LLM, SamplingParams

    from vllm.ampere.integration.attention import AmpereDeepseekV4Attention
    from vllm.ampere.integration.warmup import DRAFT_KERNELS, KERNELS

    llm = LLM(model=job["checkpoint"], skip_tokenizer_init=True, **job["options"])
    engine = llm.llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    with recorded_ops() as warmed:
        for layer in layers:
            if isinstance(layer, AmpereDeepseekV4Attention):
                for call in KERNELS.get_warmup_keys(layer):
                    call.run("cpu")
        for call in DRAFT_KERNELS.get_warmup_keys(runner.vllm_config):
            call.run("cpu")
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
    waiting = list(enumerate(job["prompts"]))
    with recorded_ops() as served:
        while waiting or engine.has_unfinished_requests():
            if waiting:  # one more each step, so that steps mix prefill and decode
                number, prompt = waiting.pop(0)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
            engine.step()
    kept = runner.get_model().get_mtp_target_hidden_states()
    shape = kept if kept is None else list(kept.shape)
    print(json.dumps({"served": sorted(served), "warmed": sorted(warmed), "kept_streams": shape}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
