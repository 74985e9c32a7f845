# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts in plain PyTorch, float32 (model_spec section 6)."""

import torch
from torch.nn.functional import silu, softplus

from ..quantization.reference import mxfp4_decode_ref
from ..row_tiles import pad_rows, row_matmul


def route_ref(logits, bias, k, scaling, image_bias=None, image_mask=None):
    """See `route`."""
    score = softplus(pad_rows(logits)).sqrt()[: logits.shape[0]]
    if image_mask is not None:
        bias = torch.where(image_mask[:, None], image_bias, bias)
    ids = (score + bias).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = score.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling, ids.int()


def mxfp4_experts_ref(x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, limit):
    """See `mxfp4_experts`."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        rows = pad_rows(x[token].float())
        gate, up = row_matmul(rows, mxfp4_decode_ref(w13[expert], w13_scale[expert])).chunk(2, -1)
        hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        y = row_matmul(hidden.to(x.dtype).float(), mxfp4_decode_ref(w2[expert], w2_scale[expert]))
        out.index_add_(0, token, y[: len(token)] * topk_weights[token, choice, None])
    return out.to(x.dtype)


def expert_order_ref(order, ids, experts, padded, block_size, count, expert_map=None):
    """Fill each expert's places, one expert after the other."""
    own = ids.flatten().long()
    if expert_map is not None:
        own = torch.where(own < 0, -1, expert_map[own.clamp_min(0)].long())
    owners = experts[: int(padded) // block_size].tolist()
    for expert in range(count):
        if expert in owners:
            routes = (own == expert).nonzero()[:, 0]
            first = owners.index(expert) * block_size
            order[first : first + len(routes)] = routes.int()
