# SPDX-License-Identifier: Apache-2.0
"""Sample a DSpark draft block, each token with a bias from the one before.

The draft model scores its five positions at once; a low-rank Markov head then adds head . embed[previous
token] to each position in turn. Upstream runs about nine kernels for each of the five steps.

The Triton implementation runs two: one program scores a tile of the vocabulary for 16 requests and keeps the
tile's best tokens, then one program a request takes the best of all tiles.
"""

import torch

from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..order_key import BELOW_ALL, order_key
from ..registry import EXACT, Case, Implementation, Op, Tolerance
from .reference import markov_sampler_ref

_VOCAB, _REQUESTS, _WARPS = 64, 16, 4
_TILES = 2048
_NONE = tl.constexpr(BELOW_ALL)
_FAR = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["last_ptr", "stride_last_req", "requests", "tiles", "step"])
def _step_scores_kernel(
    base_ptr, embed_ptr, head_ptr, last_ptr, temperature_ptr, gumbel_ptr, logits_ptr, best_key_ptr, best_token_ptr,
    stride_base_req, stride_base_step, stride_embed, stride_head, stride_last_req, stride_gumbel_req,
    stride_gumbel_step, requests, tiles, step,
    V: tl.constexpr, F: tl.constexpr, RANK: tl.constexpr, GUMBEL: tl.constexpr, VOCAB: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    """Logits of one step for a tile of the vocabulary, and the tile's best token of each request."""
    tile = tl.program_id(0)
    token = tile * VOCAB + tl.arange(0, VOCAB)
    request = tl.program_id(1).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    f = tl.arange(0, RANK)
    live = request < requests
    last = tl.load(last_ptr + request * stride_last_req, live, other=0)
    head_ptr += token.to(tl.int64)[:, None] * stride_head
    head = tl.load(head_ptr + f[None, :], (token < V)[:, None] & (f < F)[None, :], other=0.0)
    embed_ptr += last[None, :] * stride_embed
    embed = tl.load(embed_ptr + f[:, None], (f < F)[:, None] & live[None, :], other=0.0)
    inside = (token < V)[:, None] & live[None, :]
    base = tl.load(
        base_ptr + request[None, :] * stride_base_req + step * stride_base_step + token[:, None], inside, other=0.0
    )
    logits = base.to(tl.float32) + tl.dot(head, embed)
    tl.store(logits_ptr + (request * 5 + step)[None, :] * V + token[:, None], logits, inside)
    score = logits
    if GUMBEL:
        temperature = tl.load(temperature_ptr + request, live, other=0.0)[None, :]
        noise = tl.load(
            gumbel_ptr + request[None, :] * stride_gumbel_req + step * stride_gumbel_step + token[:, None],
            inside & (temperature > 0), other=0.0,
        )
        divisor = tl.broadcast_to(tl.where(temperature > 0, temperature, 1.0), (VOCAB, REQUESTS))
        score = tl.where(temperature > 0, tl.div_rn(logits, divisor) + noise, logits)
    key = tl.where((token < V)[:, None], order_key(score), _NONE)
    best = tl.max(key, 0)
    first = tl.min(tl.where(key == best[None, :], token[:, None], _FAR), 0)
    tl.store(best_key_ptr + request * tiles + tile, best, live)
    tl.store(best_token_ptr + request * tiles + tile, first, live)


@triton.jit(do_not_specialize=["tiles", "step"])
def _step_token_kernel(best_key_ptr, best_token_ptr, tokens_ptr, tiles, step, TILES: tl.constexpr):
    """The best token of one request over all tiles; of equal ones the lowest."""
    request = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, TILES)
    best = tl.full([TILES], _NONE, tl.int32)
    token = tl.full([TILES], _FAR, tl.int32)
    for base in range(0, tiles, TILES):
        tile = base + offs
        key = tl.load(best_key_ptr + request * tiles + tile, tile < tiles, other=_NONE)
        here = tl.load(best_token_ptr + request * tiles + tile, tile < tiles, other=_FAR)
        token = tl.where(key > best, here, token)
        best = tl.maximum(key, best)
    chosen = tl.min(tl.where(best == tl.max(best, 0), token, _FAR), 0)
    tl.store(tokens_ptr + request * 5 + step, chosen.to(tl.int64))


def _markov_sampler_triton(base_logits, embed, head, last_token, temperature, gumbel):
    requests, steps, vocab = base_logits.shape
    device, tiles = base_logits.device, triton.cdiv(vocab, _VOCAB)
    tokens = torch.empty(requests, steps, dtype=torch.int64, device=device)
    logits = torch.empty(requests, steps, vocab, dtype=torch.float32, device=device)
    best_key, best_token = torch.empty(2, requests, tiles, dtype=torch.int32, device=device)
    noise = base_logits if gumbel is None else gumbel
    for step in range(steps if requests else 0):
        last = tokens[:, step - 1] if step else last_token
        _step_scores_kernel[(tiles, triton.cdiv(requests, _REQUESTS))](
            base_logits, embed, head, last, temperature, noise, logits, best_key, best_token,
            base_logits.stride(0), base_logits.stride(1), embed.stride(0), head.stride(0), last.stride(0),
            noise.stride(0), noise.stride(1), requests, tiles, step,
            V=vocab, F=embed.shape[1], RANK=max(16, triton.next_power_of_2(embed.shape[1])),
            GUMBEL=gumbel is not None, VOCAB=_VOCAB, REQUESTS=_REQUESTS, num_warps=_WARPS, num_stages=1,
        )
        _step_token_kernel[(requests,)](best_key, best_token, tokens, tiles, step, TILES=_TILES, num_warps=_WARPS)
    return tokens, logits


COMPILES = (
    *(
        Launch(
            _step_scores_kernel,
            {
                "base_ptr": f"*{dtype}:16", "embed_ptr": "*bf16:16", "head_ptr": "*bf16:16", "last_ptr": "*i64",
                "temperature_ptr": "*fp32:16", "gumbel_ptr": "*fp32:16", "logits_ptr": "*fp32:16",
                "best_key_ptr": "*i32:16", "best_token_ptr": "*i32", "stride_base_req": "i32:16",
                "stride_base_step": "i32:16", "stride_embed": "i32:16", "stride_head": "i32:16",
                "stride_last_req": "i32", "stride_gumbel_req": "i32:16", "stride_gumbel_step": "i32:16",
                "requests": "i32", "tiles": "i32", "step": "i32",
            },
            {"V": 129280, "F": 256, "RANK": 256, "GUMBEL": gumbel, "VOCAB": _VOCAB, "REQUESTS": _REQUESTS},
            num_warps=_WARPS,
            num_stages=1,
        )
        for dtype, gumbel in (("bf16", False), ("bf16", True), ("fp32", True))
    ),
    Launch(
        _step_token_kernel,
        {
            "best_key_ptr": "*i32:16", "best_token_ptr": "*i32", "tokens_ptr": "*i64:16", "tiles": "i32",
            "step": "i32",
        },
        {"TILES": _TILES},
        num_warps=_WARPS,
    ),
)


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
    implementations=(Implementation("triton", _markov_sampler_triton, ("sm80", "sm86"), unavailable),),
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
