# SPDX-License-Identifier: Apache-2.0
"""Choose the experts of each token and their weights.

A learned bias decides which experts win but not how much they count; image tokens have a bias of their
own. Upstream's kernel serves fixed expert counts; this one takes any.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import normal
from ..contracts import Arg
from ..registry import EXACT, Case, Op, Tolerance
from .reference import route_ref


def route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    k: int,
    scaling: float,
    image_bias: torch.Tensor | None = None,
    image_mask: torch.Tensor | None = None,
    *,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the k experts of highest sqrt(softplus(logit)) + bias; weigh them without the bias.

    Axes: T tokens, E experts, K experts chosen for a token.

    Args:
        logits: float32 [T, E]; gate output.
        bias: float32 [E]; selection bias of text tokens.
        k: experts to choose, 1 to E.
        scaling: factor of the normalised weights; 1.5 in the released model.
        image_bias: float32 [E]; selection bias of image tokens. None if and only if image_mask is None.
        image_mask: bool [T]; True for image tokens.
        implementation: one asked for by name; default is the best for the device.

    Returns:
        weights: float32 [T, k]: score / (sum of the k scores + 1e-20) * scaling.
        ids: int32 [T, k], best biased score first, each in [0, E); of equal ones the lower expert wins.

    Numerics: float32. A token has the same bits alone and in any batch. A row with NaN gives NaN weights
    and valid, distinct ids.
    Graph safety: allocates its results, does not synchronise, depends on no host value.
    Raises: ContractError on a wrong dtype, shape, stride or device, k out of range, or half of the image pair.
    Source: model_spec section 6; replaces `vllm_topk_softplus_sqrt`.
    """
    axes = OP.check(logits=logits, bias=bias, image_bias=image_bias, image_mask=image_mask)
    if not 1 <= k <= axes["E"]:
        raise ContractError(f"route: k is {k}, must be 1 to {axes['E']}")
    if (image_bias is None) != (image_mask is None):
        raise ContractError("route: image_bias and image_mask go together")
    return OP.choose(logits.device, implementation)(logits, bias, k, scaling, image_bias, image_mask)


def _inputs(sizes, generator, device):
    tokens, experts = sizes["T"], sizes["E"]
    image = {"image_bias": None, "image_mask": None}
    if sizes["image"]:
        image["image_bias"] = normal(generator, experts, dtype=torch.float32, device=device)
        image["image_mask"] = (torch.rand(tokens, generator=generator) < 0.5).to(device)
    return {
        "logits": normal(generator, tokens, experts, dtype=torch.float32, device=device, scale=2.0),
        "bias": normal(generator, experts, dtype=torch.float32, device=device),
        "k": sizes["K"],
        "scaling": 1.5,
        **image,
    }


OP = Op(
    name="route",
    summary="Choose the experts of each token by biased score and weigh them by unbiased score.",
    axes={"T": "tokens", "E": "experts", "K": "experts chosen for a token"},
    inputs=(
        Arg("logits", "T E", (torch.float32,)),
        Arg("bias", "E", (torch.float32,)),
        Arg("image_bias", "E", (torch.float32,), optional=True),
        Arg("image_mask", "T", (torch.bool,), optional=True),
    ),
    outputs=(Arg("weights", "T K", (torch.float32,)), Arg("ids", "T K", (torch.int32,))),
    reference=route_ref,
    tolerances={"weights": Tolerance(1e-5, 1e-4), "ids": EXACT},
    cases=tuple(
        Case(f"t{t}_e{e}_k{k}{'_image' if image else ''}", {"T": t, "E": e, "K": k, "image": image}, _inputs)
        for t, e, k, image in (
            (0, 16, 2, False),
            (1, 384, 6, False),
            (65, 384, 6, True),
            (33, 128, 3, False),
            (7, 16, 16, True),
        )
    ),
    bytes_moved=lambda s: s["T"] * (s["E"] * 4 + s["K"] * 8) + s["E"] * 4,
    flops=lambda s: s["T"] * s["E"] * 8,
    replaces="vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router.vllm_topk_softplus_sqrt",
    source="6",
)
