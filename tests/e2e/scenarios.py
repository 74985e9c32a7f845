# SPDX-License-Identifier: Apache-2.0
"""What is asked of a server, and how an answer is held against the reference decoder."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from vllm.ampere.testing.engine import OPTIONS, Completion, Server
from vllm.ampere.testing.reference_decoder import ReferenceDecoder

from .replay import engine_logits

# Bound on the rms of log-probabilities over vocabulary and 8 generated tokens.
RMS_BOUND = 0.055
# A prompt inside the window, one past half of top-k at ratio 2, and one past everything, in two chunks of prefill.
LENGTHS = (20, 100, 700)
DRAFTS = {"method": "dspark", "num_speculative_tokens": 5}


@dataclass(frozen=True)
class Configuration:
    """A server: the preset of its checkpoint, and engine keywords and environment beside the common ones."""

    preset: str
    options: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)

    @property
    def replays(self) -> bool:
        """Bounded replay is on, as it is by default."""
        return self.options.get("swa_bounded_replay", True)


CONFIGURATIONS = {
    "plain": Configuration("sharp"),
    "no-replay": Configuration("sharp", {"swa_bounded_replay": False, "enable_prefix_caching": False}),
    # The others fork; without vllm-ampere's command a server spawns.
    "tp2": Configuration("sharp", {"tensor_parallel_size": 2}, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
    "pp2": Configuration("sharp", {"pipeline_parallel_size": 2}, {"VLLM_PP_LAYER_PARTITION": "4,4"}),
    "wide-topk": Configuration("wide_topk"),
    "agreeing": Configuration("parrot"),
    "dspark": Configuration("parrot", {"speculative_config": DRAFTS}),
    "dspark-3": Configuration("parrot", {"speculative_config": DRAFTS | {"num_speculative_tokens": 3}}),
    "dspark-7": Configuration("parrot", {"speculative_config": DRAFTS | {"num_speculative_tokens": 7}}),
    "dspark-tp2": Configuration("parrot", {"speculative_config": DRAFTS, "tensor_parallel_size": 2}),
}


# A near tie in top-k can fall either way between two right implementations, and one row with a heavy weight then moves
# a whole step (docs/en/numerics.md). About every second prompt of 700 tokens has such a step; these have none.
SEEDS = {700: 1, 1200: 1}
WARM_SEEDS = (15, 25)


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Ordinary token ids, always the same for the same arguments; the seed is the length's of `SEEDS`, else 0."""
    seed = SEEDS.get(length, 0) if seed is None else seed
    drawn = random.Random(f"{length}/{seed}")
    return [drawn.randrange(7, 500) for _ in range(length)]


# ------------------------------------------------------------------ scenarios


def alone(server: Server, length: int, seed: int | None = None) -> Completion:
    """One cold request of `prompt(length, seed)`."""
    return server.complete(prompt(length, seed))


def together(server: Server) -> list[tuple[list[int], Completion]]:
    """Two cold requests at once, 640 and 90 tokens, so that chunks of one run beside the other's: prompts and answers."""
    spans = []

    def ask(given):
        start = time.monotonic()
        answer = server.complete(given)
        spans.append((start, time.monotonic()))
        return given, answer

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(ask, (prompt(640, 1), prompt(90, 1))))
    assert max(start for start, _ in spans) < min(end for _, end in spans), "the requests did not overlap"
    return answers


@dataclass(frozen=True)
class Warm:
    """Requests whose beginning is in the prefix cache.

    Attributes:
        answers: prompts and answers: one prompt for the second time, and one that shares its first 650 tokens.
        hits, group_hits: prompt tokens that the cache's counters say were served, and could have been by all groups
            together, over these answers.
        trims: `replay_trim` trace events over these answers.
    """

    answers: list[tuple[list[int], Completion]]
    hits: float
    group_hits: float
    trims: list[dict]


def warm(server: Server) -> Warm:
    """A prompt of 700 tokens cold, then again, then another with the same beginning."""
    first = prompt(700, WARM_SEEDS[0])
    second = first[:650] + prompt(60, WARM_SEEDS[1])
    server.complete(first, 1, logprobs=False)
    counters, trims = ("prefix_cache_hits", "prefix_cache_group_hits"), len(server.events("replay_trim"))
    before = [server.metric(f"vllm:{name}_total") for name in counters]
    answers = [(given, server.complete(given)) for given in (first, second)]
    grown = [server.metric(f"vllm:{name}_total") - value for name, value in zip(counters, before)]
    return Warm(answers, *grown, server.events("replay_trim")[trims:])


def drafted(server: Server) -> tuple[list[list[int]], float, float]:
    """24 tokens each of prompts alone, at once, and cached: tokens, draft steps and accepted drafts (0 without drafts)."""
    given = [prompt(length, 5) for length in (20, 30, 45, 700)]

    def ask(tokens):
        return server.complete(tokens, 24, logprobs=False).tokens

    def counted(name):
        return server.metric(f"vllm:spec_decode_num_{name}_total", missing=0.0)

    before = counted("drafts"), counted("accepted_tokens")
    answers = [ask(given[0]), ask(given[3])]
    with ThreadPoolExecutor(3) as threads:
        answers += threads.map(ask, given[:3])
    answers.append(ask(given[3]))
    return answers, counted("drafts") - before[0], counted("accepted_tokens") - before[1]


def prompt_logprobs(server: Server, length: int) -> Completion:
    """One cold request that wants the log-probabilities of its prompt."""
    return server.complete(prompt(length, 4), 1, logprobs=False, prompt_logprobs=True)


# ------------------------------------------------------------------ comparison


@dataclass(frozen=True)
class Agreement:
    """An answer against the reference decoder fed with the same tokens.

    Attributes:
        rms: of the difference of log-probabilities, over vocabulary and generated tokens.
        worst_margin: the most by which the reference prefers its own token to the engine's, in log-probability.
        per_token: rms of each generated token.
    """

    rms: float
    worst_margin: float
    per_token: list[float]


def agreement(decoder: ReferenceDecoder, given: list[int], answer: Completion) -> Agreement:
    """Compare the log-probabilities of every generated token."""
    steps = OPTIONS["max_num_batched_tokens"]
    want = engine_logits(decoder, given, answer.tokens, answer.cached_tokens, steps).log_softmax(-1)
    assert answer.logprobs.shape == want.shape
    assert answer.logprobs.isfinite().all()
    square = (answer.logprobs - want).square().mean(-1)
    chosen = want.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    return Agreement(square.mean().sqrt().item(), (want.amax(-1) - chosen).max().item(), square.sqrt().tolist())
