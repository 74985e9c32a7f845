# SPDX-License-Identifier: Apache-2.0
"""The engines that the tests of this folder read from: what each is, and what it is asked.

An engine takes half a minute to start, so each is started once a session, in a process of its own, several at a time,
and asked everything; the tests then read the files.
"""

import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm.ampere.integration import emulate_sm80
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import stop

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 24_576,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 2_048,
    "max_logprobs": -1,
    "kv_cache_memory_bytes": 2 << 30,
    "gpu_memory_utilization": 0.05,
    "limit_mm_per_prompt": {"image": 0},
    "seed": 0,
    "disable_log_stats": False,
}
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "2",
}
# What this process believes is not what its children do.
BELIEFS = ("VLLM_AMPERE_ASSUME", "TRITON_OVERRIDE_ARCH", "TILELANG_DEFAULT_TARGET")
# What upstream's own path is told: the MoE that Ampere runs, since another one rounds activations otherwise.
NATIVE = {"moe_backend": "marlin"}
DRAFTS = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 5}}
LENGTHS = (20, 700, 3000)
LONG = 20_000
# Token ids of every prompt; the last marks of the tiny vocabulary stay out.
_TOKENS = (7, 490)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ordinary token ids, always the same for the same arguments."""
    drawn = random.Random(f"{length}/{seed}")
    return [drawn.randrange(*_TOKENS) for _ in range(length)]


def alone(*lengths: int, tokens: int = 24) -> list[dict]:
    """One request at a time."""
    return [{"name": f"alone-{n}", "prompts": [prompt(n)], "max_tokens": tokens} for n in lengths]


# Every prompt token's log-probabilities: such a request takes neither the prefix cache nor the replay.
PROMPT = [{"name": "prompt", "prompts": [prompt(3000, 9)], "max_tokens": 1, "prompt_logprobs": True}]
AGAIN = [PROMPT[0] | {"name": name} for name in ("prompt-again", "prompt-once-more")]
# 32 at once, so that prefill chunks run beside decodes, and decode batches shrink from 32 to 1.
MIXED = [{"name": "mixed", "prompts": [prompt(5 + 47 * i, 2) for i in range(32)], "max_tokens": 8 + 2, "logprobs": 20}]
# The same prompt again, and one that shares its first 2,900 tokens.
WARM = [
    {"name": "warm", "prompts": [prompt(3000)], "max_tokens": 24},
    {"name": "shared", "prompts": [prompt(3000)[:2900] + prompt(80, 3)], "max_tokens": 24},
]
DRAFTED = [{"name": f"drafted-{n}", "prompts": [prompt(n, 5)], "max_tokens": 64, "logprobs": 20} for n in (20, 150, 700)] + [
    {"name": "drafted-mixed", "prompts": [prompt(n, 6) for n in (20, 30, 45, 700, 1500, 90)], "max_tokens": 48, "logprobs": 20}
]
IMAGES = [
    {"name": "images", "prompts": ["Look: <｜deepseek_image｜> What is it?", "<｜deepseek_image｜> and " + "more words " * 300],
     "images": [[84, 84, 1], [300, 120, 2]], "max_tokens": 16, "logprobs": 20},
    {"name": "text", "prompts": [prompt(40, 8)], "max_tokens": 16, "logprobs": 20},
]
# Long enough for the draft's steps to select inside candidates.
DRAFTED_LONG = [{"name": "drafted-1500", "prompts": [prompt(1500, 5)], "max_tokens": 8, "logprobs": 20}]
CACHES = [{"name": "caches", "prompts": [prompt(n, 7) for n in (20, 45, 150)], "max_tokens": 24, "caches": True}]


@dataclass(frozen=True)
class Run:
    """An engine.

    Attributes:
        mode: "native", upstream's own path on a Hopper card; or the architecture that the process believes in.
        checkpoint: a key of `CHECKPOINTS`.
        steps: what it is asked, in order; see `job.py`.
        options: engine keywords on top of `OPTIONS`.
        shadow: a function of `shadow.py`, which compares two kernels on the live inputs; "" for none.
    """

    mode: str
    checkpoint: str
    steps: list[dict]
    options: dict = field(default_factory=dict)
    shadow: str = ""


# Sizes that the kernels of a GPU take (upstream's hyper-connections: 512 or a multiple); `pinned`: rounding does not change which experts run.
CHECKPOINTS = {
    "pinned": ("wide_topk", {"hidden_size": 512}),
    "free": ("wide_topk", {"hidden_size": 512, "routing_bias_std": 0.2}),
    "parrot": ("wide_topk", {"hidden_size": 512, "block_gain": 0.03, "drafts_agree": True, "dspark_markov_rank": 512}),
    "vision": ("vision", {"hidden_size": 512, "q_lora_rank": 128, "o_lora_rank": 128, "moe_intermediate_size": 256,
                          "index_n_heads": 32, "index_topk": 512, "candidate_topk_blocks": 128, "engram_vocab_size": 300}),
}
EAGER = {"enforce_eager": True}
NO_REPLAY = {"swa_bounded_replay": False, "enable_prefix_caching": False}
SMALL = {"kv_cache_memory_bytes": 160 << 20, "max_model_len": 2_048}  # every page is compared after every insert
SYNCHRONOUS = {"async_scheduling": False}  # the caches are read between steps
SEEING = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}, "mm_encoder_attn_backend": "TORCH_SDPA"}
FULL_SET = PROMPT + AGAIN + alone(*LENGTHS, LONG) + WARM + MIXED
RUNS = {
    "native": Run("native", "pinned", FULL_SET),
    "sm80": Run("sm80", "pinned", FULL_SET),
    "sm80-eager": Run("sm80", "pinned", FULL_SET, EAGER),
    "sm80-no-replay": Run("sm80", "pinned", alone(*LENGTHS) + MIXED, NO_REPLAY),
    "sm86": Run("sm86", "parrot", DRAFTED, DRAFTS),
    "native-free": Run("native", "free", PROMPT + alone(*LENGTHS)),
    "sm80-free": Run("sm80", "free", PROMPT + alone(*LENGTHS)),
    "native-dspark": Run("native", "parrot", DRAFTED, DRAFTS),
    "sm80-dspark": Run("sm80", "parrot", DRAFTED + CACHES, DRAFTS | SYNCHRONOUS),
    "sm80-parrot": Run("sm80", "parrot", DRAFTED + CACHES, SYNCHRONOUS),
    "native-vision": Run("native", "vision", IMAGES, SEEING),
    "sm80-vision": Run("sm80", "vision", IMAGES, SEEING),
    "shadow": Run("native", "pinned", alone(*LENGTHS) + MIXED, EAGER, "behind_upstream"),
    "shadow-dspark": Run("native", "parrot", DRAFTED, EAGER | DRAFTS, "behind_upstream"),
    "references": Run("sm80", "pinned", alone(20, 700, tokens=6) + MIXED, EAGER | SMALL, "behind_ours"),
    "references-dspark": Run("sm80", "parrot", DRAFTED[:2] + DRAFTED_LONG, EAGER | SMALL | DRAFTS, "behind_ours"),
}


class Runner:
    """Starts runs, `at_once` side by side, and hands out what they wrote.

    Args:
        folder: takes checkpoints, logs and results.
        at_once: engines on the card at a time.
    """

    def __init__(self, folder: Path, at_once: int = 8):
        self.folder, self._pool, self._results = folder, ThreadPoolExecutor(at_once), {}

    def start(self, names) -> None:
        for name in names:
            if name not in self._results:
                self._results[name] = self._pool.submit(self._run, name)

    def finish(self) -> None:
        """Wait for every run that was started, so that what follows has the machine alone."""
        wait(self._results.values())

    def checkpoint(self, name: str) -> Path:
        preset, overrides = CHECKPOINTS[name]
        return tiny_checkpoint.write(self.folder / name, preset, **overrides)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def trims(self, name: str) -> list[dict]:
        """Trace events of a run: rows that bounded replay left out of a layer."""
        lines = (self.folder / f"{name}.trace").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == "replay_trim"]

    def result(self, name: str) -> dict:
        """What `job.py` wrote for a run.

        Raises:
            RuntimeError: the run failed; the message holds the end of its log.
        """
        self.start([name])
        return self._results[name].result()

    def _run(self, name: str) -> dict:
        run = RUNS[name]
        output, asked = self.folder / f"{name}.pt", self.folder / f"{name}.json"
        options = OPTIONS | (NATIVE if run.mode == "native" else {}) | run.options
        asked.write_text(json.dumps({"checkpoint": str(self.checkpoint(run.checkpoint)), "options": options,
                                     "steps": run.steps, "output": str(output), "shadow": run.shadow}))
        env = believing(run.mode) | {"VLLM_AMPERE_TRACE": str(self.folder / f"{name}.trace"),
                                     "TRITON_CACHE_DIR": str(self.folder / f"triton-{run.mode}")}
        code = execute([str(Path(__file__).with_name("job.py")), str(asked)], self.folder / f"{name}.log", env)
        if code != 0:
            raise RuntimeError(f"{name} ended with {code}:\n{self.log(name)[-6000:]}")
        return torch.load(output)


def card() -> tuple[int, int]:
    """Compute capability of the card at hand; (0, 0) without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def believing(mode: str) -> dict[str, str]:
    """Environment under which a process runs the path of `mode`; empty where the card is that already."""
    return {} if mode == "native" or emulate_sm80.CAPABILITIES[mode] == card() else {"VLLM_AMPERE_ASSUME": mode}


def obstacle(mode: str) -> str:
    """Why the path of `mode` cannot run on the card at hand; "" if it can."""
    if mode == "native" and card() != (9, 0):
        return "upstream's own path needs a Hopper card"
    if mode == "sm86" and card() == (8, 0):
        return "compute capability 8.6 is shown on an 8.6 or a newer card"
    return ""


def execute(command: list[str], log: Path, env: dict[str, str], limit_s: float = 420.0) -> int | None:
    """Run this Python in the engine's environment; its exit status, or None if it was stopped at the limit."""
    ours = {name: value for name, value in os.environ.items() if name not in BELIEFS} | ENVIRONMENT | env
    ours["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH"), str(ROOT)]))
    with open(log, "wb") as sink:
        child = subprocess.Popen([sys.executable, *command], stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                 env=ours, start_new_session=True)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop(child)
