# SPDX-License-Identifier: Apache-2.0
"""Sample a DSpark draft block, each token with a bias from the one before.

The draft model scores its positions at once; a low-rank Markov head then adds head . embed[previous token] to each
position in turn. Upstream runs about nine kernels for each of the steps.

The Triton implementation "triton" runs two: the product with the head, which stays cuBLAS's so that a bias has upstream's
bits, and one launch for the rest. A program of it scores 1024 tokens of one request, 127 programs at the model's
vocabulary; their best token reaches the others as one atomic maximum of a number that holds score and token, so
neither the order of programs nor their count can change the result. The last program of a request to arrive writes
the token and its embedding, which the next product reads. Nothing returns to the host. "triton-inside" runs one, which
computes the product too, for 16 requests and 64 tokens a program.

Where each rank scores a shard of the vocabulary, that number is all that ranks exchange.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...errors import ContractError
from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..order_key import BELOW_ALL, order_key
from ..registry import EXACT, Case, Implementation, Op
from .draft_noise import draft_noise
from .reference import LAST_TOKEN, markov_sampler_ref

_WARPS = 4
_NONE = tl.constexpr(BELOW_ALL)
_LAST = tl.constexpr(LAST_TOKEN)
# Ranks that share a vocabulary, at most.
_SHARDS = 64


@dataclass(frozen=True)
class Tile:
    """What one program scores: `rows` requests times `block` tokens; `inside`: it computes the bias too."""

    rows: int
    block: int
    inside: bool


APART, INSIDE = Tile(1, 1024, False), Tile(16, 64, True)


@triton.jit
def _settle(
    word, row, live, tokens_ptr, steps, step, embed_ptr, stride_embed, next_ptr, F: tl.constexpr, RANK: tl.constexpr
):
    """Write the tokens of words, and their embeddings for the next step."""
    token = _LAST - (word & _LAST)
    tl.store(tokens_ptr + row * steps + step, token, live)
    f = tl.arange(0, RANK)[None, :]
    copied = live[:, None] & (f < F)
    embedding = tl.load(embed_ptr + token[:, None] * stride_embed + f, copied, other=0.0)
    tl.store(next_ptr + row[:, None] * F + f, embedding, copied)


@triton.jit(do_not_specialize=["first_token", "requests", "step"])
def _markov_step_kernel(
    base_ptr, bias_ptr, request_ptr, position_ptr, temperature_ptr, seeds_ptr, drafts_ptr, best_ptr, tokens_ptr,
    embed_ptr, next_ptr, stride_base, stride_base_step, stride_bias, stride_request, stride_position,
    stride_drafts, stride_drafts_step, stride_embed, steps, vocab, first_token, requests, step,
    F: tl.constexpr, RANK: tl.constexpr, DRAFTS: tl.constexpr, WHOLE: tl.constexpr, INSIDE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step for a tile of the vocabulary.

    `bias_ptr` is the bias [R, V], or the head [V, F] if INSIDE; `best_ptr` [2, S, R] holds the best words and, by
    groups of ROWS requests, how many programs have arrived.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live, token = row < requests, (first_token + column)[None, :]
    inside = live[:, None] & (column < vocab)[None, :]
    if INSIDE:
        f = tl.arange(0, RANK)
        head_ptr = bias_ptr + column.to(tl.int64)[None, :] * stride_bias + f[:, None]
        head = tl.load(head_ptr, (f < F)[:, None] & (column < vocab)[None, :], other=0.0)
        last = tl.load(next_ptr + row[:, None] * F + f[None, :], live[:, None] & (f < F)[None, :], other=0.0)
        bias = tl.dot(last, head).to(last.dtype)
    else:
        bias = tl.load(bias_ptr + row[:, None] * stride_bias + column[None, :], inside, other=0.0)
    base_ptr += row[:, None] * stride_base + step * stride_base_step + column[None, :]
    base = tl.load(base_ptr, inside, other=0.0)
    logits = (base.to(tl.float32) + bias.to(tl.float32)).to(base.dtype)
    score = logits.to(tl.float32)
    if DRAFTS:
        request = tl.load(request_ptr + row * stride_request + step, live, other=-1)
        known = request >= 0
        drafts_ptr += (request * stride_drafts + step * stride_drafts_step)[:, None] + token
        tl.store(drafts_ptr, logits, inside & known[:, None])
        temperature = tl.load(temperature_ptr + request, known, other=0.0)
        if tl.max(temperature, 0) > 0:
            seed = tl.load(seeds_ptr + request, known, other=0)[:, None]
            position = tl.load(position_ptr + row * stride_position + step, live, other=0)[:, None]
            hot = (temperature > 0)[:, None]
            heated = score / tl.where(hot, temperature[:, None], 1.0) + draft_noise(seed, step, position, token)
            score = tl.where(hot, heated, score)
    key = tl.where(score == score, order_key(score), _NONE).to(tl.int64) + 2147483648
    word = tl.max(tl.where(inside, (key << 31) | (_LAST - token), 0), 1)
    tl.atomic_max(best_ptr + step * requests + row, word, live)
    if WHOLE:
        tl.debug_barrier()  # every thread's maximum is before the one that counts
        arrived = tl.atomic_add(best_ptr + (steps + step) * requests + tl.program_id(1), 1)
        if arrived == tl.num_programs(0) - 1:
            best = tl.load(best_ptr + step * requests + row, live, other=0, volatile=True)
            _settle(best, row, live, tokens_ptr, steps, step, embed_ptr, stride_embed, next_ptr, F, RANK)


@triton.jit(do_not_specialize=["words_ptr", "shards", "requests", "step"])
def _markov_choose_kernel(
    words_ptr, tokens_ptr, embed_ptr, next_ptr, stride_embed, steps, shards, requests, step,
    F: tl.constexpr, RANK: tl.constexpr, SHARDS: tl.constexpr,
):  # fmt: skip
    """The best token of one request over the shards' words [G, R]."""
    row, shard = tl.program_id(0).to(tl.int64) + tl.arange(0, 1), tl.arange(0, SHARDS)
    words = tl.load(words_ptr + shard[None, :] * requests + row[:, None], (shard < shards)[None, :], other=0)
    _settle(tl.max(words, 1), row, row >= 0, tokens_ptr, steps, step, embed_ptr, stride_embed, next_ptr, F, RANK)


def _sample(
    tile, base_logits, embed, head, last_token, request, position, temperature, seeds, draft_logits=None, first_token=0,
    exchange=None,
):  # fmt: skip
    requests, steps, vocab = base_logits.shape
    rank = embed.shape[1]
    tokens = torch.empty(requests, steps, dtype=torch.int64, device=base_logits.device)
    if not requests:
        return tokens
    best = tokens.new_zeros(2, steps, requests)
    last = embed[last_token]
    drafts = base_logits if draft_logits is None else draft_logits
    grid = triton.cdiv(vocab, tile.block), triton.cdiv(requests, tile.rows)
    width = {"F": rank, "RANK": max(16, triton.next_power_of_2(rank))}
    for step in range(steps):
        if vocab:
            bias = head if tile.inside else F.linear(last, head)
            _markov_step_kernel[grid](
                base_logits, bias, request, position, temperature, seeds, drafts, best, tokens, embed, last,
                base_logits.stride(0), base_logits.stride(1), bias.stride(0), request.stride(0), position.stride(0),
                drafts.stride(0), drafts.stride(1), embed.stride(0), steps, vocab, first_token, requests, step,
                DRAFTS=draft_logits is not None, WHOLE=exchange is None, INSIDE=tile.inside, ROWS=tile.rows,
                BLOCK=tile.block, num_warps=_WARPS, **width,
            )  # fmt: skip
        if exchange is not None:
            words = exchange(best[0, step])
            _markov_choose_kernel[(requests,)](
                words, tokens, embed, last, embed.stride(0), steps, len(words), requests, step, SHARDS=_SHARDS,
                num_warps=1, **width,
            )  # fmt: skip
    return tokens


_WIDTH = {"F": 256, "RANK": 256}
_EMBED = {
    "tokens_ptr": "*i64:16", "embed_ptr": "*bf16:16", "next_ptr": "*bf16:16", "stride_embed": "i32:16",
    "steps": "i32", "requests": "i32", "step": "i32",
}  # fmt: skip
COMPILES = (
    *(
        Launch(
            _markov_step_kernel,
            _EMBED | {
                "base_ptr": "*bf16:16", "bias_ptr": "*bf16:16", "request_ptr": "*i64:16", "position_ptr": "*i64:16",
                "temperature_ptr": "*fp32:16", "seeds_ptr": "*i64:16", "drafts_ptr": "*bf16:16", "best_ptr": "*i64:16",
                "stride_base": "i32:16", "stride_base_step": "i32:16", "stride_bias": "i32:16",
                "stride_request": "i32", "stride_position": "i32", "stride_drafts": "i32:16",
                "stride_drafts_step": "i32:16", "vocab": "i32:16", "first_token": "i32",
            },
            {"DRAFTS": drafts, "WHOLE": whole, "INSIDE": tile.inside, "ROWS": tile.rows, "BLOCK": tile.block} | _WIDTH,
            num_warps=_WARPS,
        )
        for tile in (APART, INSIDE) for drafts in (False, True) for whole in (True, False)
    ),
    Launch(
        _markov_choose_kernel, _EMBED | {"words_ptr": "*i64", "shards": "i32"}, {"SHARDS": _SHARDS} | _WIDTH, num_warps=1
    ),
)  # fmt: skip


def markov_sampler(
    base_logits: torch.Tensor,
    embed: torch.Tensor,
    head: torch.Tensor,
    last_token: torch.Tensor,
    request: torch.Tensor,
    position: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    first_token: int = 0,
    exchange: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Sample S tokens in sequence: the largest logit, or Gumbel-max with upstream's noise.

    Axes: R requests, S draft steps, V vocabulary of this rank, E whole vocabulary, F rank of the head, Q request
    states.

    Args:
        base_logits: bfloat16 [R, S, V]; draft logits without the bias.
        embed: bfloat16 [E, F]; row t is the embedding of previous token t.
        head: bfloat16 [V, F]; row v gives the bias of token first_token + v.
        last_token: int32 or int64 [R], each in [0, E); the newest token of the request.
        request: int64 [R, S]; row of the request's state; -1: a padded row, sampled without noise and not recorded.
        position: int64 [R, S]; position of the token that is sampled.
        temperature: float32 [Q]; 0: the largest logit.
        seeds: int64 [Q].
        draft_logits: bfloat16 [Q, S, W], W at least E; receives base logits plus bias in columns first_token on. None:
            every request takes its largest logit.
        first_token: token of the first column; 0 where V is the whole vocabulary.
        exchange: int64 [R] -> int64 [G, R], this rank's and every other rank's; None: there is one rank.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        int64 [R, S], each in [0, E). Of equal scores the lowest token wins. A NaN never wins; a row of nothing else
        gives the lowest token. The shards of a vocabulary give what the whole gives.

    Numerics: bias and logits are rounded to bfloat16, as upstream's; score = logits / temperature + noise in float32.
    The bias of the Triton implementation is `torch.nn.functional.linear`'s, whose bits may depend on R.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or columns past the vocabulary's last.
    Source: model_spec section 9; replaces the loop of `DSparkSpeculator._sample_sequential`.
    """
    axes = OP.check(
        base_logits=base_logits, embed=embed, head=head, last_token=last_token, request=request, position=position,
        temperature=temperature, seeds=seeds, draft_logits=draft_logits,
    )  # fmt: skip
    if not 0 <= first_token <= axes["E"] - axes["V"]:
        raise ContractError(
            f"markov_sampler: columns {first_token} to {first_token + axes['V']} of a vocabulary of {axes['E']}"
        )
    if draft_logits is not None and axes["W"] < axes["E"]:
        raise ContractError(f"markov_sampler: draft_logits has {axes['W']} on axis W, must be at least {axes['E']}")
    return OP.choose(base_logits.device, implementation)(
        base_logits, embed, head, last_token, request, position, temperature, seeds, draft_logits, first_token, exchange
    )


def _inputs(sizes, generator, device):
    """Weights whose products are exact in float32, so that a bias has the same bits whatever adds it up."""
    requests, vocab, rank = sizes["R"], sizes["V"], sizes["F"]
    steps, states = sizes["S"], requests + 3
    temperature = integers(generator, 0, 3, states).float() / 2
    request = torch.randperm(states, generator=generator)[:requests]
    if requests > 2:
        request[-1] = -1
    first = integers(generator, 0, 1 << 18, requests)
    drafts = torch.zeros(states, steps, vocab, dtype=torch.bfloat16, device=device) if sizes["drafts"] else None
    shard = {"exchange": lambda words: words[None]} if sizes.get("shards") else {}
    return shard | {
        "base_logits": normal(generator, requests, steps, vocab, device=device),
        "embed": integers(generator, -4, 5, vocab, rank).div(4).bfloat16().to(device),
        "head": integers(generator, -4, 5, vocab, rank).div(rank).bfloat16().to(device),
        "last_token": integers(generator, 0, vocab, requests, device=device),
        "request": request[:, None].expand(-1, steps).contiguous().to(device),
        "position": (first[:, None] + torch.arange(steps)).to(device),
        "temperature": temperature.to(device),
        "seeds": integers(generator, -(2**63), 2**63 - 1, states, device=device),
        "draft_logits": drafts,
    }


BF16, I64 = (torch.bfloat16,), (torch.int64,)
OP = Op(
    name="markov_sampler",
    summary="Sample a DSpark draft block in sequence, with a Markov bias from the token before.",
    axes={
        "R": "requests", "S": "draft steps", "V": "vocabulary of this rank", "E": "whole vocabulary",
        "F": "rank of the Markov head", "Q": "request states", "W": "columns of the recorded logits",
    },
    inputs=(
        Arg("base_logits", "R S V", BF16),
        Arg("embed", "E F", BF16),
        Arg("head", "V F", BF16),
        Arg("last_token", "R", (torch.int32, torch.int64)),
        Arg("request", "R S", I64),
        Arg("position", "R S", I64),
        Arg("temperature", "Q", (torch.float32,)),
        Arg("seeds", "Q", I64),
        Arg("draft_logits", "Q S W", BF16, optional=True),
    ),
    outputs=(Arg("tokens", "R S", I64),),
    mutates=("draft_logits",),
    reference=markov_sampler_ref,
    implementations=(
        Implementation("triton", functools.partial(_sample, APART), ("sm80", "sm86"), unavailable),
        Implementation("triton-inside", functools.partial(_sample, INSIDE), ("sm80", "sm86"), unavailable),
    ),
    tolerances={"tokens": EXACT, "draft_logits": EXACT},
    cases=tuple(
        Case(
            f"r{r}_v{v}_f{f}{'_drafts' if drafts else ''}{'_shard' if shard else ''}",
            {"R": r, "S": 5, "V": v, "F": f, "drafts": drafts, "shards": shard},
            _inputs,
        )
        for r, v, f, drafts, shard in (
            (0, 100, 32, False, False), (1, 5000, 256, False, False), (3, 1027, 64, True, False),
            (17, 513, 32, True, True), (64, 80, 32, False, False),
        )
    ),
    bytes_moved=lambda s: s["S"] * (s["V"] * s["F"] * 2 + s["R"] * s["V"] * (2 + 2 * s["drafts"])),
    flops=lambda s: s["S"] * s["R"] * s["V"] * (2 * s["F"] + 3),
    replaces="vllm.v1.worker.gpu.spec_decode.dspark.speculator.DSparkSpeculator._sample_sequential",
    source="9",
)  # fmt: skip
