# SPDX-License-Identifier: Apache-2.0
"""Choose the experts of each token and their weights.

A learned bias decides which experts win but not how much they count; image tokens have a bias of their
own. Upstream's kernel serves fixed expert counts; this one takes any.

A Triton program owns one token and takes the largest score k times.
"""

import torch

from ...errors import ContractError
from ...testing.inputs import normal
from ..contracts import Arg
from ..launch import Launch, tl, triton, unavailable
from ..order_key import BELOW_ALL, order_key
from ..registry import EXACT, Case, Implementation, Op, Tolerance
from .reference import route_ref

_WARPS = 1
_CHOSEN = tl.constexpr(BELOW_ALL)


@triton.jit
def _softplus(x):
    """log(1 + e^x) = max(x, 0) + 2 artanh(y / (2 + y)), y = e^-|x| <= 1: a series in odd powers of at most 1/3.

    Without it the logarithm of a number close to 1 would lose the small scores' digits.
    """
    y = tl.exp(-tl.abs(x))
    s = y / (2.0 + y)
    square = s * s
    series = 1.0 / 15
    for denominator in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / denominator
    return tl.where(x > 0, x, 0.0) + 2.0 * s * series


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, image_bias_ptr, image_mask_ptr, weights_ptr, ids_ptr, stride_logits_tok, scaling,
    E: tl.constexpr, K: tl.constexpr, IMAGE: tl.constexpr, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    score = tl.sqrt_rn(_softplus(tl.load(logits_ptr + token * stride_logits_tok + expert, expert < E, other=0.0)))
    bias = tl.load(bias_ptr + expert, expert < E, other=0.0)
    if IMAGE:
        image_bias = tl.load(image_bias_ptr + expert, expert < E, other=0.0)
        bias = tl.where(tl.load(image_mask_ptr + token) != 0, image_bias, bias)
    key = tl.where(expert < E, order_key(score + bias), _CHOSEN)
    ids = tl.zeros([CHOICES], tl.int32)
    weights = tl.zeros([CHOICES], tl.float32)
    for i in range(K):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, EXPERTS), 0)
        ids = tl.where(choice == i, best, ids)
        weights = tl.where(choice == i, tl.sum(tl.where(expert == best, score, 0.0), 0), weights)
        key = tl.where(expert == best, _CHOSEN, key)
    weights = weights / (tl.sum(weights, 0) + 1e-20) * scaling
    tl.store(ids_ptr + token * K + choice, ids, choice < K)
    tl.store(weights_ptr + token * K + choice, weights, choice < K)


def _route_triton(logits, bias, k, scaling, image_bias=None, image_mask=None):
    tokens, experts = logits.shape
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    image = image_mask is not None
    if tokens:
        _route_kernel[(tokens,)](
            logits, bias, image_bias if image else bias, image_mask.view(torch.uint8) if image else bias, weights, ids,
            logits.stride(0), scaling, E=experts, K=k, IMAGE=image,
            EXPERTS=triton.next_power_of_2(experts), CHOICES=triton.next_power_of_2(k), num_warps=_WARPS,
        )
    return weights, ids


COMPILES = tuple(
    Launch(
        _route_kernel,
        {
            "logits_ptr": "*fp32:16", "bias_ptr": "*fp32:16", "image_bias_ptr": "*fp32:16",
            "image_mask_ptr": "*u8:16" if image else "*fp32:16", "weights_ptr": "*fp32:16", "ids_ptr": "*i32:16",
            "stride_logits_tok": "i32:16", "scaling": "fp32",
        },
        {"E": 384, "K": 6, "IMAGE": image, "EXPERTS": 512, "CHOICES": 8},
        num_warps=_WARPS,
    )
    for image in (False, True)
)


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
    implementations=(Implementation("triton", _route_triton, ("sm80", "sm86"), unavailable),),
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
