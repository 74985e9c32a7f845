# SPDX-License-Identifier: Apache-2.0
"""Hash the n-grams that end at each token into rows of an engram table.

A token hashes its last 2, 3 and 4 compressed ids, each through 8 heads; a (order, head) pair owns a
prime-sized range of rows of its layer's table. A request arrives in chunks, so the three ids before its
chunk come along as look-back.
"""

import numpy
import torch

from ...errors import ContractError
from ...model_spec import engram_primes
from ...testing.inputs import integers
from ..contracts import Arg
from ..registry import EXACT, Case, Op
from .reference import DEAD, engram_hash_ref

ORDERS, HEADS = 3, 8


def hash_primes(layers: int, vocab_size: int) -> torch.Tensor:
    """Primes of all engram layers, drawn from one pool without repetition.

    Args:
        layers: engram layers of the model, in order; the pool of a layer goes on where the one before ended.
        vocab_size: `engram_vocab_size`, the least value of the first prime.

    Returns:
        int64 [layers, 3, 8]: n-gram orders 2, 3, 4, then heads. Their sum over a layer is its table's rows.
    """
    return torch.tensor(engram_primes(layers, ORDERS, HEADS, vocab_size))


def hash_multipliers(layer_ids: tuple[int, ...], compressed_vocab_size: int) -> torch.Tensor:
    """Odd multipliers of each engram layer, small enough that id * multiplier fits 63 bits.

    Args:
        layer_ids: `engram_layer_ids`.
        compressed_vocab_size: classes of normalised tokens; every multiplier depends on it.

    Returns:
        int64 [layers, 4], for the token itself and the three before it.
    """
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    drawn = [numpy.random.default_rng(10007 * layer).integers(0, bound, ORDERS + 1, numpy.int64) for layer in layer_ids]
    return torch.tensor(numpy.array(drawn).reshape(-1, ORDERS + 1) * 2 + 1)


def engram_hash(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    lookback: torch.Tensor,
    primes: torch.Tensor,
    multipliers: torch.Tensor,
    pad_id: int,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Rows of one layer's table for the n-grams that end at each token.

    R_0 = a_0 m_0, R_i = R_(i-1) xor a_i m_i; row = R_i mod prime + first row of the column. a_i is the
    compressed id i tokens back; once that is before the sequence or dead, it and all older are the pad id.

    Axes: T tokens, R requests, Q = R + 1.

    Args:
        tokens: int64 [T], compressed ids; -1: dead (an image token). Chunks of the requests in order.
        positions: int64 [T], tokens; consecutive within a chunk.
        query_start: int32 or int64 [R + 1]; request r owns tokens query_start[r] to query_start[r + 1],
            which may be none. Tokens past the last start are padding: their rows are valid, and mean nothing.
        lookback: int64 [R, 3]; compressed ids before each chunk, the nearest first; -1: dead. Entries
            before the start of the sequence may hold anything.
        primes: int64 [3, 8], one layer of `hash_primes`.
        multipliers: int64 [4], one layer of `hash_multipliers`.
        pad_id: compressed id of the pad token.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        int64 [T, 24], newly allocated; orders 2, 3, 4, then heads. Each column lies in its own range.

    Numerics: exact.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or tokens without a request.
    Source: model_spec section 8; replaces `NgramHashState.forward` on the V2 runner, after its token map.
    """
    axes = OP.check(
        tokens=tokens, positions=positions, query_start=query_start, lookback=lookback,
        primes=primes, multipliers=multipliers,
    )
    if axes["Q"] != axes["R"] + 1:
        raise ContractError(f"engram_hash: {axes['Q']} query starts for {axes['R']} requests")
    if axes["T"] and not axes["R"]:
        raise ContractError(f"engram_hash: {axes['T']} tokens of no request")
    return OP.choose(tokens.device, implementation)(
        tokens, positions, query_start, lookback, primes, multipliers, pad_id
    )


def _inputs(sizes, generator, device):
    tokens, requests = sizes["T"], sizes["R"]
    inner = integers(generator, 0, tokens + 1, max(requests - 1, 0)).sort().values
    ends = torch.cat([inner, torch.tensor([tokens])]) if requests else inner
    query_start = torch.cat([torch.tensor([0]), ends])
    first = integers(generator, 0, 6, requests)
    request = torch.repeat_interleave(torch.arange(requests), query_start.diff())
    positions = torch.arange(tokens) - query_start[request] + first[request]
    return {
        "tokens": integers(generator, DEAD, 99092, tokens, device=device),
        "positions": positions.to(device),
        "query_start": query_start.int().to(device),
        "lookback": integers(generator, DEAD, 99092, requests, ORDERS, device=device),
        "primes": hash_primes(1, 16_000_000)[0].to(device),
        "multipliers": hash_multipliers((1,), 99092)[0].to(device),
        "pad_id": 7,
    }


OP = Op(
    name="engram_hash",
    summary="Hash the n-grams that end at each token into rows of an engram table.",
    axes={"T": "tokens", "R": "requests", "Q": "requests + 1"},
    inputs=(
        Arg("tokens", "T", (torch.int64,)),
        Arg("positions", "T", (torch.int64,)),
        Arg("query_start", "Q", (torch.int32, torch.int64)),
        Arg("lookback", "R 3", (torch.int64,)),
        Arg("primes", "3 8", (torch.int64,)),
        Arg("multipliers", "4", (torch.int64,)),
    ),
    outputs=(Arg("rows", "T 24", (torch.int64,)),),
    reference=engram_hash_ref,
    tolerances={"rows": EXACT},
    cases=tuple(Case(f"t{t}_r{r}", {"T": t, "R": r}, _inputs) for t, r in ((0, 0), (1, 1), (6, 3), (129, 9))),
    bytes_moved=lambda s: s["T"] * (16 + 24 * 8) + s["R"] * 28,
    flops=lambda s: s["T"] * (8 + 24 * 2),
    replaces="vllm.models.deepseek_v41.common.engram.NgramHashState.forward",
    source="8",
)
