# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with its engine in a process of its own: how long it takes to start, and that nothing compiles afterwards."""

import re
import threading

import pytest

from vllm.ampere.serving import STARTED_BY
from vllm.ampere.testing.engine import Server

from .runs import DRAFTS, ENVIRONMENT, OPTIONS, believing, prompt

pytestmark = [pytest.mark.gpu, pytest.mark.reads("sm80", "sm80-dspark")]
LATE = re.compile(r"(Triton|TileLang|CuTeDSL)[\w ]* (?:compilation|autotuning)[\w ]* during inference: (\S+)")


@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "dspark"])
def test_start_and_late_compiles(runs, tmp_path, drafts):
    """Warm caches, alone on the machine, started as `vllm-ampere serve` does; then requests of many sizes, one by one and at once."""
    runs.finish()
    options = {**OPTIONS, "skip_tokenizer_init": None, "disable_log_stats": None, "enable_prompt_tokens_details": True, "jit_monitor_verbose": True,
               "engram_config": None, "enforce_eager": None, **drafts}
    env = {**ENVIRONMENT, **STARTED_BY, **believing("sm80"), "TRITON_CACHE_DIR": str(runs.folder / "triton-sm80"), "CUDA_VISIBLE_DEVICES": "0",
           "TRITON_INTERPRET": "0"}
    checkpoint = runs.checkpoint("parrot" if drafts else "pinned")
    with Server(checkpoint, tmp_path, options, env) as server:
        started_s = server.startup_s
        for length in (1, 2, 5, 17, 64, 129, 500, 513, 1100, 2049, 5000, 15_000):
            answer = server.complete(prompt(length, 11), 4, logprobs=False)
            assert len(answer.tokens) == 4
        threads = [threading.Thread(target=server.complete, args=(prompt(n, 12), 30, False)) for n in range(3, 3000, 157)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    late = sorted(set(LATE.findall(server.log.read_text())))
    runs.figures[f"serve, {'DSpark' if drafts else 'plain'}"] = f"healthy after {started_s:.1f} s, late compiles {late}"
    assert not late
    # What is asked for is 35 s without drafts: a draft block brings weights and graphs of its own.
    assert started_s <= (45 if drafts else 35)
