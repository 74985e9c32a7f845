# SPDX-License-Identifier: Apache-2.0
"""Random schedules of requests, each a function of its seed.

Lengths are drawn with weight on the edges: one token; the window of 128; a chunk of 256 and two of them; odd and even
halves of ratio-2 pairs; ends of pages of 32 and 128 tokens; lengths past the top-k of 64 rows and its candidates.
"""

import random
from dataclasses import dataclass

LONGEST, MOST_WITHHELD = 900, 170
NEW_TOKENS = (1, 1, 2, 2, 3, 4, 6, 12)
EDGES = sorted({near for edge in (1, 32, 64, 128, 192, 256, 384, 512, 640, 768) for near in (edge - 1, edge, edge + 1)}
               - {0} | {LONGEST - 1, LONGEST})


@dataclass(frozen=True)
class Scenario:
    """What an engine is asked after its prefix cache was emptied.

    Attributes:
        rounds: lists of requests; a round starts when the one before has ended. A request is [token ids, engine step of
            the round at which it arrives, {"sampling": keywords of SamplingParams, "abort": step at which it is
            aborted, or None}].
        withheld: blocks that the pool lacks meanwhile, so that requests are preempted.
    """

    rounds: list[list[list]]
    withheld: int

    @property
    def one_in_flight(self) -> bool:
        return all(len(requests) == 1 for requests in self.rounds)


def random_scenario(seed: int) -> Scenario:
    """In two scenarios of five every round has one request; in the others two to four are in flight.

    Prompts continue or repeat the beginning of earlier ones now and then.
    """
    drawn, earlier = random.Random(f"scenario/{seed}"), []
    alone = drawn.random() < 0.4
    rounds = [[_request(drawn, earlier, alone) for _ in range(1 if alone else drawn.randint(2, 4))]
              for _ in range(drawn.choice((1, 2) if alone else (1, 1, 2)))]
    return Scenario(rounds, 0 if alone else drawn.choice((0, MOST_WITHHELD // 2, MOST_WITHHELD)))


def _request(drawn: random.Random, earlier: list[list[int]], alone: bool) -> list:
    # Long prompts are dear, and rare here; so are log-probabilities of many rows.
    (edge,) = drawn.choices(EDGES, [1 / (64 + edge) for edge in EDGES])
    length = edge if drawn.random() < 0.7 else drawn.randint(1, 500)
    shared = []
    if earlier and drawn.random() < 0.5:
        known = drawn.choice(earlier)
        shared = known[: drawn.choice((len(known), drawn.choice(EDGES), drawn.randint(1, len(known))))]
    prompt = (shared + [drawn.randrange(7, 500) for _ in range(max(1, length - len(shared)))])[:LONGEST]
    earlier.append(prompt)
    sampling = {"max_tokens": drawn.choice(NEW_TOKENS)}
    if drawn.random() < 0.4:
        sampling |= {"temperature": drawn.choice((0.5, 1.0)), "seed": drawn.randrange(2**31)}
    if len(prompt) < 200 and drawn.random() < 0.2:
        sampling["prompt_logprobs"] = drawn.randint(0, 3)
    arrives = 0 if alone else drawn.choice((0, 0, drawn.randint(1, 8)))
    abort = arrives + drawn.randint(1, 8) if not alone and drawn.random() < 0.12 else None
    return [prompt, arrives, {"sampling": sampling, "abort": abort}]
