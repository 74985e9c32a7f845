# SPDX-License-Identifier: Apache-2.0
"""Undo the rotary embedding of the attention output.

Key and value are the same rotated vector, so the output of every head carries the rotation of its
keys relative to position 0. Rotating the last 64 dimensions back by the query's position leaves the
relative one. Takes the place of upstream's fused kernel called with `quantize=False`, which SM80
cannot compile: its fp8 branch is lowered even when it is not taken.
"""

import torch

from ...testing.inputs import integers, normal, rope_table
from ..contracts import Arg
from ..registry import Case, Op, Tolerance
from .reference import inverse_rope_ref


def inverse_rope(o: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, implementation: str | None = None) -> torch.Tensor:
    """Rotate the last 64 dimensions of each head back by the position of its token.

    Axes: T tokens, H query heads on this rank, M positions in the table.

    Args:
        o: bfloat16 [T, H, 512], last dimension contiguous; attention output.
        positions: int64 [T], tokens, each in [0, M).
        cos_sin: float32 [M, 64]: 32 cosines then 32 sines.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        bfloat16 [T, H, 512], newly allocated; the first 448 dimensions are the input's bits.

    Numerics: float32 rotation, one rounding to bfloat16.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device.
    Source: model_spec section 5; replaces `fused_inv_rope_fp8_quant(quantize=False)`.
    """
    OP.check(o=o, positions=positions, cos_sin=cos_sin)
    return OP.choose(o.device, implementation)(o, positions, cos_sin)


def _inputs(sizes, generator, device):
    return {
        "o": normal(generator, sizes["T"], sizes["H"], 512, device=device),
        "positions": integers(generator, 0, sizes["M"], sizes["T"], device=device),
        "cos_sin": rope_table(sizes["M"], device=device),
    }


OP = Op(
    name="inverse_rope",
    summary="Rotate the last 64 dimensions of the attention output back by the query position.",
    axes={"T": "tokens", "H": "query heads on this rank", "M": "positions in the rotary table"},
    inputs=(
        Arg("o", "T H 512", (torch.bfloat16,)),
        Arg("positions", "T", (torch.int64,)),
        Arg("cos_sin", "M 64", (torch.float32,)),
    ),
    outputs=(Arg("o", "T H 512", (torch.bfloat16,)),),
    reference=inverse_rope_ref,
    tolerances={"o": Tolerance(2e-3, 4e-2)},
    cases=tuple(Case(f"t{t}_h{h}", {"T": t, "H": h, "M": 4096}, _inputs) for t, h in ((0, 8), (1, 8), (6, 64), (129, 16))),
    bytes_moved=lambda s: s["T"] * s["H"] * 512 * 4 + s["T"] * (8 + 256),
    flops=lambda s: s["T"] * s["H"] * 32 * 6,
    replaces="vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant",
    source="5",
)
