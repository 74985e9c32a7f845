# SPDX-License-Identifier: Apache-2.0
"""Selection of compressed rows by index score: candidate blocks, their mask, and the top k.

Layer 20 of the released model lists the best blocks of 8 rows; later index sources look inside them
only. Results are ascending, so that equal sets are equal tensors, and ties go to the lower row.
A NaN ranks as -inf, so no input can produce an index outside [-1, S).
"""

import torch

from ...errors import ContractError
from ...testing.inputs import ascending_lists, integers, normal
from ..contracts import Arg
from ..launch import unavailable
from ..registry import EXACT, Case, Implementation, Op
from .candidate_topk_triton import candidate_blocks_triton, mask_to_candidates_triton, select_topk_triton
from .reference import candidate_blocks_ref, mask_to_candidates_ref, select_topk_ref


def candidate_blocks(
    scores: torch.Tensor, visible: torch.Tensor, blocks: int, block_size: int, *, implementation: str | None = None
) -> torch.Tensor:
    """List the best blocks of consecutive rows of each token.

    Axes: T query tokens, S compressed rows.

    Args:
        scores: float32 [T, S]; NaN counts as -inf; columns from `visible` on are not read.
        visible: int32 [T], rows the token sees, at most S; 0 or less: none.
        blocks: blocks to list, at least 1; 2048 in the released model.
        block_size: rows a block, at least 1; 8 in the released model.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        int32 [T, blocks], block numbers ascending, then -1. A block scores its best row; the block of the
        newest row, (visible - 1) // block_size, is always listed; others only if they score above -inf.

    Numerics: exact.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a count below 1.
    Source: model_spec section 5; replaces `select_candidate_blocks`.
    """
    CANDIDATE_BLOCKS.check(scores=scores, visible=visible)
    _check_positive("candidate_blocks", blocks=blocks, block_size=block_size)
    return CANDIDATE_BLOCKS.choose(scores.device, implementation)(scores, visible, blocks, block_size)


def mask_to_candidates(
    scores: torch.Tensor, candidates: torch.Tensor, block_size: int, *, implementation: str | None = None
) -> torch.Tensor:
    """Set the scores outside the listed blocks to -inf.

    Axes: T query tokens, S compressed rows, C listed blocks.

    Args:
        scores: float32 [T, S].
        candidates: int32 [T, C], block numbers in any order; negative or past the last block: ignored.
        block_size: rows a block, at least 1.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        float32 [T, S], newly allocated; listed columns keep their bits.

    Numerics: exact.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, or a block size below 1.
    Source: model_spec section 5; replaces `apply_candidate_mask`.
    """
    MASK_TO_CANDIDATES.check(scores=scores, candidates=candidates)
    _check_positive("mask_to_candidates", block_size=block_size)
    return MASK_TO_CANDIDATES.choose(scores.device, implementation)(scores, candidates, block_size)


def select_topk(
    scores: torch.Tensor,
    k: int,
    visible: torch.Tensor | None = None,
    candidates: torch.Tensor | None = None,
    block_size: int = 1,
    *,
    implementation: str | None = None,
) -> torch.Tensor:
    """Choose the k best rows of each token.

    Axes: T query tokens, S compressed rows, C listed blocks.

    Args:
        scores: float32 [T, S]; NaN counts as -inf.
        k: rows to choose, at least 1; 512 in the released model.
        visible: int32 [T], rows the token sees; 0 or less: none. Without candidates the columns from it on are not
            read, with them those behind the first ceil(visible / block_size) blocks. None: every column is.
        candidates: None: column j is row j. Else int32 [T, C], block numbers ascending, then -1: column j is row
            candidates[j // block_size] * block_size + j % block_size, as `candidate_mqa_logits` packs them, and
            S is C * block_size; columns of a -1, and of rows that the token does not see, are at -inf.
        block_size: rows a block, at least 1.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        int32 [T, k], rows ascending, then -1; a row at -inf is never chosen. Without candidates every entry is in
        [-1, S).

    Numerics: exact; of equal scores the lower row wins.
    Graph safety: allocates its result, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, a count below 1, or another S than C * block_size.
    Source: model_spec section 5; replaces `top_k_per_row_prefill` and `persistent_topk`.
    """
    axes = SELECT_TOPK.check(scores=scores, visible=visible, candidates=candidates)
    _check_positive("select_topk", k=k, block_size=block_size)
    if candidates is not None and axes["S"] != axes["C"] * block_size:
        raise ContractError(f"select_topk: scores has {axes['S']} columns, must be {axes['C']} x {block_size}")
    return SELECT_TOPK.choose(scores.device, implementation)(scores, k, visible, candidates, block_size)


def _check_positive(op, **counts):
    for name, count in counts.items():
        if count < 1:
            raise ContractError(f"{op}: {name} is {count}, must be at least 1")


def _scores(sizes, generator, device):
    """Rounded, so that scores tie."""
    return (normal(generator, sizes["T"], sizes["S"], dtype=torch.float32) * 50).round().to(device)


def _block_inputs(sizes, generator, device):
    visible = integers(generator, 0, sizes["S"] + 1, sizes["T"], dtype=torch.int32, device=device)
    size = sizes.get("block_size", 8)
    return {"scores": _scores(sizes, generator, device), "visible": visible, "blocks": sizes["C"], "block_size": size}


def _mask_inputs(sizes, generator, device):
    given = _block_inputs(sizes, generator, device)
    listed = candidate_blocks_ref(**given)
    return {
        "scores": _scores(sizes, generator, device), "candidates": listed, "block_size": given["block_size"],
    }


def _topk_inputs(sizes, generator, device):
    given = {"scores": _scores(sizes, generator, device), "k": sizes["K"]}
    if not sizes.get("bounded"):
        return given
    size = sizes.get("block_size", 1)
    given["visible"] = integers(generator, 0, 2 * sizes["S"], sizes["T"], dtype=torch.int32, device=device)
    if size == 1:
        return given | {"visible": given["visible"] // 2}
    blocks = sizes["C"]
    counts = integers(generator, 0, blocks + 1, sizes["T"])
    listed = ascending_lists(generator, counts, 2 * blocks, blocks).to(device)
    row = (listed.unsqueeze(-1) * size + torch.arange(size, device=device)).flatten(1)
    given["scores"][(row < 0) | (row >= given["visible"][:, None])] = -torch.inf
    return given | {"candidates": listed, "block_size": size}


_SIZES = (
    {"T": 0, "S": 100, "C": 4, "K": 16},
    {"T": 1, "S": 100, "C": 4, "K": 16},
    {"T": 33, "S": 1027, "C": 16, "K": 64},
    {"T": 5, "S": 300, "C": 2048, "K": 512},
)
_BOUNDED = {"T": 9, "S": 320, "C": 40, "K": 64, "bounded": True}
_AXES = {"T": "query tokens", "S": "compressed rows", "C": "listed blocks", "K": "selected rows"}
_SCORES = Arg("scores", "T S", (torch.float32,))


def _cases(make):
    return tuple(Case("t{T}_s{S}_c{C}_k{K}".format(**sizes), sizes, make) for sizes in _SIZES)


CANDIDATE_BLOCKS = Op(
    name="candidate_blocks",
    summary="List the best blocks of consecutive compressed rows of each token.",
    axes=_AXES,
    inputs=(_SCORES, Arg("visible", "T", (torch.int32,))),
    outputs=(Arg("candidates", "T C", (torch.int32,)),),
    reference=candidate_blocks_ref,
    implementations=(Implementation("triton", candidate_blocks_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"candidates": EXACT},
    cases=_cases(_block_inputs),
    bytes_moved=lambda s: s["T"] * (s["S"] + s["C"] + 1) * 4,
    flops=lambda s: s["T"] * s["S"],
    replaces="vllm.model_executor.kernels.attention.dsa.candidate_blocks.select_candidate_blocks",
    source="5",
)

MASK_TO_CANDIDATES = Op(
    name="mask_to_candidates",
    summary="Set scores outside the listed blocks to -inf.",
    axes=_AXES,
    inputs=(_SCORES, Arg("candidates", "T C", (torch.int32,))),
    outputs=(Arg("scores", "T S", (torch.float32,)),),
    reference=mask_to_candidates_ref,
    implementations=(Implementation("triton", mask_to_candidates_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"scores": EXACT},
    cases=_cases(_mask_inputs),
    bytes_moved=lambda s: s["T"] * (2 * s["S"] + s["C"]) * 4,
    flops=lambda s: s["T"] * s["S"],
    replaces="vllm.model_executor.kernels.attention.dsa.candidate_blocks.apply_candidate_mask",
    source="5",
)

SELECT_TOPK = Op(
    name="select_topk",
    summary="Choose the k best compressed rows of each token.",
    axes=_AXES,
    inputs=(
        _SCORES, Arg("visible", "T", (torch.int32,), optional=True), Arg("candidates", "T C", (torch.int32,), optional=True),
    ),
    outputs=(Arg("rows", "T K", (torch.int32,)),),
    reference=select_topk_ref,
    implementations=(Implementation("triton", select_topk_triton, ("sm80", "sm86"), unavailable),),
    tolerances={"rows": EXACT},
    cases=(
        *_cases(_topk_inputs),
        Case("t9_s320_k64_bounded", _BOUNDED, _topk_inputs),
        Case("t9_c40_b8_k64", _BOUNDED | {"block_size": 8}, _topk_inputs),
    ),
    bytes_moved=lambda s: s["T"] * (s["S"] + s["K"] + s["C"] * ("block_size" in s)) * 4,
    flops=lambda s: s["T"] * s["S"],
    replaces="vllm._custom_ops.top_k_per_row_prefill",
    source="5",
)

OPS = (CANDIDATE_BLOCKS, MASK_TO_CANDIDATES, SELECT_TOPK)
