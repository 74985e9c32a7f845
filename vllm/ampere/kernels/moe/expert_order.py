# SPDX-License-Identifier: Apache-2.0
"""Put the tokens of each expert in order.

A sort by expert that leaves the order within an expert to atomics gives a token another place in every run, and where
a product splits its sum by place, other bits.

A Triton program owns one expert: it finds the expert's first block and writes the expert's routes in the order in which
it meets them.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import integers
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import EXACT, Case, Implementation, Op
from .reference import expert_order_ref

_CHUNK = 1024
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["routes", "block_size"])
def _expert_order_kernel(
    order_ptr, ids_ptr, experts_ptr, padded_ptr, map_ptr, routes, block_size, MAPPED: tl.constexpr, CHUNK: tl.constexpr
):
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    blocks = tl.load(padded_ptr) // block_size
    first = tl.full([], _NOWHERE, tl.int32)
    for base in range(0, blocks, CHUNK):
        block = base + lane
        owner = tl.load(experts_ptr + block, block < blocks, other=-1)
        first = tl.minimum(first, tl.min(tl.where(owner == expert, block, _NOWHERE), 0))
    if first < _NOWHERE:
        place = first * block_size
        for base in range(0, routes, CHUNK):
            route = base + lane
            owner = tl.load(ids_ptr + route, route < routes, other=-1)
            if MAPPED:
                owner = tl.load(map_ptr + owner, owner >= 0, other=-1)
            mine = (owner == expert).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(mine, 0) - 1, route, mine != 0)
            place += tl.sum(mine, 0)


def _expert_order_triton(order, ids, experts, padded, block_size, count, expert_map=None):
    if ids.numel():
        _expert_order_kernel[(count,)](
            order, ids, experts, padded, ids if expert_map is None else expert_map, ids.numel(), block_size,
            MAPPED=expert_map is not None, CHUNK=_CHUNK,
        )


COMPILES = tuple(
    Launch(
        _expert_order_kernel,
        {**{f"{name}_ptr": "*i32:16" for name in ("order", "ids", "experts", "padded", "map")},
         "routes": "i32", "block_size": "i32"},
        {"MAPPED": mapped, "CHUNK": _CHUNK},
    )
    for mapped in (False, True)
)  # fmt: skip


def expert_order(
    order: torch.Tensor,
    ids: torch.Tensor,
    experts: torch.Tensor,
    padded: torch.Tensor,
    block_size: int,
    count: int,
    expert_map: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Sort the routes of each expert among its places.

    A route is a token and one of its choices: number token * K + choice. Routes are sorted by expert, and each expert
    has whole blocks of places, those behind its routes empty.

    Axes: T tokens, K experts chosen for a token, N places, B blocks, G experts of all ranks.

    Args:
        order: int32 [N], routes by expert; written in place, at the places of each expert's routes only.
        ids: int32 [T, K] dense, expert of each route; negative for none.
        experts: int32 [B], expert of each block, those of one expert side by side; blocks past `padded` are not read.
        padded: int32 [1], places in use, a multiple of block_size, at most N.
        block_size: places of a block, at least 1.
        count: experts of this rank, at least 1; those in `experts` lie in [0, count).
        expert_map: int32 [G], number on this rank of each id, negative for another rank's; None: ids are numbers here.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        None. Each expert's routes ascend.

    Numerics: integers.
    Graph safety: allocates nothing, does not synchronise, depends on no host value but `block_size` and `count`.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a block_size or count below 1.
    Source: what Marlin's experts read (`moe_align_block_size`); model_spec section 6.
    """
    OP.check(order=order, ids=ids, experts=experts, padded=padded, expert_map=expert_map)
    if min(block_size, count) < 1:
        raise ContractError(f"{OP.name}: block_size is {block_size} and count {count}, both must be at least 1")
    OP.choose(order.device, implementation)(order, ids, experts, padded, block_size, count, expert_map)


def _inputs(sizes, generator, device):
    """Routes sorted by expert, in a random order within each; one token in ten has no expert."""
    tokens, k, count, block_size, ranks = (sizes[name] for name in ("T", "K", "E", "block", "ranks"))
    ids = torch.rand(tokens, count * ranks, generator=generator).argsort(1)[:, :k].int()
    ids[torch.rand(tokens, generator=generator) < 0.1] = -1
    mapping = torch.full((count * ranks,), -1, dtype=torch.int32)
    mapping[torch.randperm(count * ranks, generator=generator)[:count]] = torch.arange(count, dtype=torch.int32)
    own = torch.where(ids < 0, -1, mapping[ids.long()]) if ranks > 1 else ids
    order, experts = [], []
    for expert in range(count):
        routes = (own.flatten() == expert).nonzero()[:, 0]
        blocks = -(-len(routes) // block_size)
        routes = routes[torch.randperm(len(routes), generator=generator)]
        order += [*routes.tolist(), *[ids.numel()] * (blocks * block_size - len(routes))]
        experts += [expert] * blocks
    spare = integers(generator, 0, count, 3, dtype=torch.int32, device=torch.device("cpu")).tolist()
    given = {
        "order": torch.tensor(order + [-7] * block_size, dtype=torch.int32),
        "ids": ids,
        "experts": torch.tensor(experts + spare, dtype=torch.int32),
        "padded": torch.tensor([len(order)], dtype=torch.int32),
    }
    given |= {"expert_map": mapping} if ranks > 1 else {}
    return {name: tensor.to(device) for name, tensor in given.items()} | {"block_size": block_size, "count": count}


OP = Op(
    name="expert_order",
    summary="Put the tokens of each expert in order.",
    axes={"T": "tokens", "K": "experts chosen for a token", "N": "places", "B": "blocks", "G": "experts of all ranks"},
    inputs=(
        Arg("order", "N", (torch.int32,)),
        Arg("ids", "T K", (torch.int32,), contiguous="full"),
        Arg("experts", "B", (torch.int32,)),
        Arg("padded", "1", (torch.int32,)),
        Arg("expert_map", "G", (torch.int32,), optional=True),
    ),
    outputs=(),
    reference=expert_order_ref,
    implementations=(Implementation("triton", _expert_order_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"order": EXACT},
    cases=tuple(
        Case(f"t{t}_e{e}_k{k}_b{block}_of{ranks}", {"T": t, "E": e, "K": k, "block": block, "ranks": ranks}, _inputs)
        for t, e, k, block, ranks in ((0, 4, 2, 8, 1), (1, 8, 3, 8, 1), (70, 4, 2, 8, 1), (300, 48, 6, 16, 2), (700, 16, 6, 64, 1))
    ),
    bytes_moved=lambda s: s["T"] * s["K"] * 8 * (1 if s["ranks"] == 1 else 2),
    flops=lambda s: 0,
    mutates=("order",),
    replaces="the order within an expert that torch.ops._moe_C.moe_align_block_size leaves to atomics",
    source="6",
)
