# SPDX-License-Identifier: Apache-2.0
"""Sample a DSpark draft block, each token with a bias from the one before.

The draft model scores its five positions at once; a low-rank Markov head then adds head . embed[previous
token] to each position in turn. Upstream runs about nine kernels for each of the five steps.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..registry import EXACT, Case, Op, Tolerance
from .reference import markov_sampler_ref


def markov_sampler(
    base_logits: torch.Tensor,
    embed: torch.Tensor,
    head: torch.Tensor,
    last_token: torch.Tensor,
    temperature: torch.Tensor,
    gumbel: torch.Tensor | None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample five tokens in sequence: argmax, or Gumbel-max with the noise given.

    Axes: R requests, V vocabulary, F rank of the head.

    Args:
        base_logits: float32 or bfloat16 [R, 5, V]; draft logits without the bias.
        embed: bfloat16 [V, F]; row t is the embedding of previous token t.
        head: bfloat16 [V, F]; row v gives the bias of token v.
        last_token: int64 [R], each in [0, V); the newest token of the request.
        temperature: float32 [R]; 0: the largest logit, noise unused.
        gumbel: float32 [R, 5, V], -log(-log(u)) of uniform u; None: every request takes its largest logit.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        tokens: int64 [R, 5], each in [0, V); of equal scores the lower token wins.
        logits: float32 [R, 5, V]: base logits plus bias, before temperature and noise.

    Numerics: float32; score = logits / temperature + gumbel. A request has the same bits alone and in any
    batch.
    Graph safety: allocates its results, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 9; replaces the loop of `DSparkSpeculator._sample_sequential`.
    """
    OP.check(
        base_logits=base_logits, embed=embed, head=head, last_token=last_token, temperature=temperature, gumbel=gumbel
    )
    return OP.choose(base_logits.device, implementation)(base_logits, embed, head, last_token, temperature, gumbel)


def _inputs(sizes, generator, device):
    requests, vocab, rank = sizes["R"], sizes["V"], sizes["F"]
    uniform = torch.rand(requests, 5, vocab, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
    return {
        "base_logits": normal(generator, requests, 5, vocab, dtype=sizes["dtype"], device=device),
        "embed": normal(generator, vocab, rank, device=device),
        "head": normal(generator, vocab, rank, device=device, scale=rank**-0.5),
        "last_token": integers(generator, 0, vocab, requests, device=device),
        "temperature": (integers(generator, 0, 3, requests).float() / 2).to(device),
        "gumbel": -(-uniform.log()).log().float().to(device) if sizes["gumbel"] else None,
    }


OP = Op(
    name="markov_sampler",
    summary="Sample a DSpark draft block in sequence, with a Markov bias from the token before.",
    axes={"R": "requests", "V": "vocabulary", "F": "rank of the Markov head"},
    inputs=(
        Arg("base_logits", "R 5 V", (torch.float32, torch.bfloat16)),
        Arg("embed", "V F", (torch.bfloat16,)),
        Arg("head", "V F", (torch.bfloat16,)),
        Arg("last_token", "R", (torch.int64,)),
        Arg("temperature", "R", (torch.float32,)),
        Arg("gumbel", "R 5 V", (torch.float32,), optional=True),
    ),
    outputs=(Arg("tokens", "R 5", (torch.int64,)), Arg("logits", "R 5 V", (torch.float32,))),
    reference=markov_sampler_ref,
    tolerances={"tokens": EXACT, "logits": Tolerance(1e-5, 1e-4)},
    cases=tuple(
        Case(
            f"r{r}_v{v}_f{f}{'_gumbel' if gumbel else ''}",
            {"R": r, "V": v, "F": f, "gumbel": gumbel, "dtype": dtype},
            _inputs,
        )
        for r, v, f, gumbel, dtype in (
            (0, 100, 32, False, torch.float32),
            (1, 5000, 256, False, torch.bfloat16),
            (3, 1027, 64, True, torch.float32),
            (17, 513, 32, True, torch.bfloat16),
        )
    ),
    bytes_moved=lambda s: 5 * (s["V"] * s["F"] * 2 + s["R"] * s["V"] * (s["dtype"].itemsize + 4 + 4 * s["gumbel"])),
    flops=lambda s: 5 * s["R"] * s["V"] * (2 * s["F"] + 3),
    replaces="vllm.v1.worker.gpu.spec_decode.dspark.speculator.DSparkSpeculator._sample_sequential",
    source="9",
)
