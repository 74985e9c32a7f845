# SPDX-License-Identifier: Apache-2.0
"""Pool the tokens of a group into one normalised latent.

At ratio 2 every channel takes its own softmax over the gates of two consecutive tokens. Where a chunk
opens with the second token of a group, the first comes from a ring that keeps each request's last rows
in float32: the row of position p is row p % capacity of the request's ring block. After pooling the
chunk's last rows enter the ring. At ratio 1 there is no gate and no ring.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import unavailable
from ..registry import EXACT, Case, Implementation, Op, Tolerance
from .compressor_pool_triton import _compressor_pool_triton
from .reference import compressor_pool_ref


def compressor_pool(
    kv_score: torch.Tensor,
    positions: torch.Tensor,
    state: torch.Tensor | None,
    slots: torch.Tensor,
    query_start: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    ratio: int,
    prev_rows: torch.Tensor | None = None,
    prev_row_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Pool and normalise the latent of every group that closes in this batch; keep the ring.

    Axes: T tokens, S slots (S <= T), L positions given (S <= L), R requests, E ring blocks, C rows a ring
    block, F gathered rows.

    Args:
        kv_score: float32 [T, 512*ratio]: 512 values, then at ratio 2 their 512 gate logits.
        positions: int64 [L], tokens; consecutive within a request.
        state: float32 [E, C, 1024], ring blocks, written in place; None at ratio 1.
        slots: int64 [S]: at ratio 2 ring slots, block * C + position % C; at ratio 1 any slot. Negative: a
            padding token, which closes no group and does not enter the ring; so are all tokens after the last
            request.
        query_start: int32 [R+1], first token of each request's chunk, ascending; None at ratio 1.
        norm_weight: bfloat16 [512].
        eps: added to the mean square; 1e-20 in this model, so an all-zero row stays zero.
        ratio: tokens a group, 1 or 2.
        prev_rows: float32 [F, 1024], rows gathered from other ranks, or None. When given, the ring is only read.
        prev_row_indices: int [at least R], row of `prev_rows` before each request's first token, or -1 for the ring.
        out: bfloat16 [T, 512], written in place of a new tensor.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, 512]: the group's latent at the token that closes it, (position + 1) % ratio == 0;
        zeros in every other row.

    Numerics: float32 softmax, pooling and norm, one rounding to bfloat16. A row depends on its two tokens only.
    Graph safety: allocates its result unless `out` is given, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, a ratio that is neither 1 nor 2, an
        argument that the ratio needs and lacks, or one of the `prev` pair without the other.
    Source: model_spec section 5 (compressor) and 12; replaces `fused_save_compress_norm`.
    """
    axes = OP.check(
        kv_score=kv_score, positions=positions, state=state, slots=slots, query_start=query_start,
        norm_weight=norm_weight, prev_rows=prev_rows, prev_row_indices=prev_row_indices, out=out,
    )  # fmt: skip
    if ratio not in (1, 2):
        raise ContractError(f"{OP.name}: ratio is {ratio}, must be 1 or 2")
    if axes["W"] != 512 * ratio:
        raise ContractError(
            f"{OP.name}: kv_score has {axes['W']} on its last axis, must be {512 * ratio} at ratio {ratio}"
        )
    if axes["S"] > min(axes["T"], axes["L"]):
        raise ContractError(f"{OP.name}: slots has {axes['S']} entries for {axes['T']} rows and {axes['L']} positions")
    if ratio == 2 and (state is None or query_start is None):
        raise ContractError(f"{OP.name}: {'state' if state is None else 'query_start'} is missing, ratio 2 needs it")
    if (prev_rows is None) != (prev_row_indices is None):
        raise ContractError(f"{OP.name}: prev_rows and prev_row_indices go together")
    return OP.choose(kv_score.device, implementation)(
        kv_score, positions, state, slots, query_start, norm_weight, eps, ratio, prev_rows, prev_row_indices, out
    )


def _inputs(sizes, generator, device):
    lengths, starts, capacity, ratio = sizes["lengths"], sizes["starts"], 8, sizes["ratio"]
    tokens = sum(lengths)
    positions = torch.cat([torch.arange(n) + first for n, first in zip(lengths, starts)] or [torch.empty(0)]).long()
    block = torch.repeat_interleave(torch.arange(len(lengths)) + 1, torch.tensor(lengths, dtype=torch.int64))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    linked = {
        "prev_rows": normal(generator, 3, 1024, dtype=torch.float32, device=device),
        "prev_row_indices": (torch.arange(len(lengths)) % 4 - 1).int().to(device),
    }
    return {
        "kv_score": normal(generator, tokens + 3, 512 * ratio, dtype=torch.float32, device=device),
        "positions": torch.nn.functional.pad(positions, (0, 3)).to(device),
        "state": normal(generator, len(lengths) + 1, capacity, 1024, dtype=torch.float32, device=device)
        if ratio == 2
        else None,
        "slots": torch.nn.functional.pad(block * capacity + positions % capacity, (0, 3), value=-1).to(device),
        "query_start": ends.int().to(device) if ratio == 2 else None,
        "norm_weight": normal(generator, 512, device=device),
        "eps": 1e-20,
        "ratio": ratio,
        **(linked if sizes.get("linked") else {}),
    }


_BATCHES = {
    "empty": {"lengths": [], "starts": []},
    "one": {"lengths": [1], "starts": [5]},
    "mixed": {"lengths": [1, 0, 6, 33, 1], "starts": [4, 2, 7, 0, 301]},
}

OP = Op(
    name="compressor_pool",
    summary="Pool the tokens of a group into one normalised latent and keep the ring of open groups.",
    axes={
        "T": "tokens",
        "S": "slots",
        "L": "positions given",
        "W": "512 * ratio",
        "R1": "requests + 1",
        "R2": "requests or more",
        "E": "ring blocks",
        "C": "rows a ring block",
        "F": "gathered rows",
    },
    inputs=(
        Arg("kv_score", "T W", (torch.float32,)),
        Arg("positions", "L", (torch.int64,)),
        Arg("state", "E C 1024", (torch.float32,), optional=True),
        Arg("slots", "S", (torch.int64,)),
        Arg("query_start", "R1", (torch.int32,), optional=True),
        Arg("norm_weight", "512", (torch.bfloat16,)),
        Arg("prev_rows", "F 1024", (torch.float32,), optional=True),
        Arg("prev_row_indices", "R2", (torch.int32, torch.int64), optional=True),
        Arg("out", "T 512", (torch.bfloat16,), optional=True),
    ),
    outputs=(Arg("latent", "T 512", (torch.bfloat16,)),),
    reference=compressor_pool_ref,
    implementations=(Implementation("triton", _compressor_pool_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"latent": Tolerance(2e-3, 4e-2), "state": EXACT},
    cases=(
        *(Case(f"{name}_r{r}", sizes | {"ratio": r}, _inputs) for name, sizes in _BATCHES.items() for r in (1, 2)),
        Case("linked_r2", _BATCHES["mixed"] | {"ratio": 2, "linked": True}, _inputs),
    ),
    bytes_moved=lambda s: sum(s["lengths"]) * (s["ratio"] * 2048 + 1024 + 16),
    flops=lambda s: sum(s["lengths"]) * 512 * 8,
    mutates=("state",),
    replaces="vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache.fused_save_compress_norm",
    source="5",
)
