# SPDX-License-Identifier: Apache-2.0
"""The activation between an expert's two matrix products, from pairs of gate and up to rows as wide as Marlin wants.

Gate and up alternate, so a pair is one 32-bit word. Upstream's operator wants all gates before all ups and writes
rows of their width, which the down projection's tiles may not divide; this one fills the rest of the row with zeros.

A Triton program owns a row's block of outputs.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import integers, normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..registry import Case, Implementation, Op, Tolerance
from .reference import clamped_swiglu_ref

_BLOCK, _WARPS = 512, 4


@triton.jit
def clamped_silu_product(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of float32 values; a NaN of either stays one."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["topk_ids_ptr", "expert_map_ptr"])
def _clamped_swiglu_kernel(
    gate_up_ptr, out_ptr, topk_ids_ptr, expert_map_ptr, limit,
    I: tl.constexpr, P: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    here = True
    if MAPPED:
        expert = tl.load(topk_ids_ptr + row)
        here = tl.load(expert_map_ptr + expert, expert >= 0, other=-1) >= 0
    if here:
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        pairs = tl.load(gate_up_ptr.to(tl.pointer_type(tl.uint32)) + row * I + offs, offs < I, other=0)
        gate = (pairs << 16).to(tl.float32, bitcast=True)
        up = (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)
        y = clamped_silu_product(gate, up, limit)
        tl.store(out_ptr + row * P + offs, y.to(tl.bfloat16), offs < P)


def _clamped_swiglu_triton(gate_up, out, limit, topk_ids=None, expert_map=None):
    rows, width = out.shape
    if rows:
        _clamped_swiglu_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, topk_ids, expert_map, limit,
            I=gate_up.shape[1] // 2, P=width, MAPPED=topk_ids is not None, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip


COMPILES = tuple(
    Launch(
        _clamped_swiglu_kernel,
        {"gate_up_ptr": "*bf16:16", "out_ptr": "*bf16:16", "limit": "fp32"}
        | ({"topk_ids_ptr": f"*{mapped}", "expert_map_ptr": "*i32"} if mapped else {}),
        {"I": inner, "P": padded, "MAPPED": bool(mapped), "BLOCK": _BLOCK}
        | ({} if mapped else {"topk_ids_ptr": None, "expert_map_ptr": None}),
        num_warps=_WARPS,
    )
    for inner, padded, mapped in ((288, 320, ""), (576, 576, ""), (2304, 2304, "i32"), (2304, 2304, "i64"))
)


def clamped_swiglu(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    limit: float,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> None:
    """Fill rows with silu(min(gate, limit)) * clamp(up, -limit, limit), then zeros.

    Axes: R rows, one a token and chosen expert; I intermediate size of this rank; P width of a row of `out`, at
    least I; X experts of all ranks.

    Args:
        gate_up: bfloat16 [R, 2*I], dense: gate 0, up 0, gate 1, up 1, ...
        out: bfloat16 [R, P], dense, written in place.
        limit: clamp of the gate from above and of the up projection from both sides.
        topk_ids: int32 or int64 [R], the expert of each row, below X; negative: a row of padding, which is left as it
            is. Given where `expert_map` is.
        expert_map: int32 [X], negative for an expert of another rank, whose rows are left as they are.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        None.

    Numerics: float32, one rounding to bfloat16. A NaN stays in its element.
    Graph safety: allocates nothing, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, P below I, or one of the last two tensors alone.
    Source: model_spec section 6; replaces `_C.silu_and_mul_with_clamp` between Marlin's products.
    """
    OP.check(gate_up=gate_up, out=out, topk_ids=topk_ids, expert_map=expert_map)
    if out.shape[1] * 2 < gate_up.shape[1]:
        raise ContractError(f"clamped_swiglu: out has {out.shape[1]} columns, must be at least {gate_up.shape[1] // 2}")
    if (topk_ids is None) != (expert_map is None):
        raise ContractError("clamped_swiglu: topk_ids and expert_map must be given together")
    OP.choose(out.device, implementation)(gate_up, out, limit, topk_ids, expert_map)


def _inputs(sizes, generator, device):
    rows, inner, experts = sizes["R"], sizes["I"], sizes["X"]
    owner = integers(generator, -1, 2, experts).int()
    return {
        "gate_up": normal(generator, rows, 2 * inner, device=device, scale=8.0),
        "out": torch.full((rows, sizes["P"]), torch.nan, dtype=torch.bfloat16, device=device),
        "limit": 10.0,
        "topk_ids": integers(generator, 0, experts, rows).int().to(device) if experts else None,
        "expert_map": owner.to(device) if experts else None,
    }


OP = Op(
    name="clamped_swiglu",
    summary="SwiGLU with clamps, from pairs of gate and up to padded rows.",
    axes={"R": "rows, one a token and chosen expert", "I": "intermediate size", "P": "width of a row of the result",
          "X": "experts of all ranks"},
    inputs=(
        Arg("gate_up", "R 2*I", (torch.bfloat16,), contiguous="full"),
        Arg("out", "R P", (torch.bfloat16,), contiguous="full"),
        Arg("topk_ids", "R", (torch.int32, torch.int64), optional=True),
        Arg("expert_map", "X", (torch.int32,), optional=True),
    ),
    outputs=(),
    reference=clamped_swiglu_ref,
    implementations=(Implementation("triton", _clamped_swiglu_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"out": Tolerance(4e-3, 4e-2)},
    mutates=("out",),
    cases=tuple(
        Case(f"r{r}_i{i}_p{p}_x{x}", {"R": r, "I": i, "P": p, "X": x}, _inputs)
        for r, i, p, x in ((0, 32, 64, 0), (6, 288, 320, 0), (37, 576, 576, 0), (33, 96, 128, 8))
    ),
    bytes_moved=lambda s: s["R"] * (4 * s["I"] + 2 * s["P"]),
    flops=lambda s: s["R"] * s["I"] * 8,
    replaces="torch.ops._C.silu_and_mul_with_clamp",
    source="6",
)  # fmt: skip
