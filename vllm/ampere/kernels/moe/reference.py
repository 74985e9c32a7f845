# SPDX-License-Identifier: Apache-2.0
"""The mixture of experts in plain PyTorch, float32 (model_spec section 6)."""

import torch
from torch.nn.functional import silu, softplus

from ..quantization.reference import mxfp4_decode_ref
from ..row_tiles import pad_rows, row_matmul
from .marlin_layout import unpack, unpack_scales


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

    def matrices(expert):
        return mxfp4_decode_ref(w13[expert], w13_scale[expert]), mxfp4_decode_ref(w2[expert], w2_scale[expert])

    return _sum_of_experts(x, len(w13), matrices, topk_weights, topk_ids, limit)


def _sum_of_experts(x, experts, matrices, topk_weights, topk_ids, limit):
    """`matrices`: expert -> its W1 over W3 and its W2, float32."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        if not 0 <= expert < experts:
            continue
        token, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
        gate_up, down = matrices(expert)
        gate, up = row_matmul(pad_rows(x[token].float()), gate_up).chunk(2, -1)
        hidden = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        y = row_matmul(hidden.to(x.dtype).float(), down)
        out.index_add_(0, token, y[: len(token)] * topk_weights[token, choice, None])
    return out.to(x.dtype)


def _local_experts(ids, expert_map):
    """Numbers on this rank; negative for experts of others, and for the negative ids of padding."""
    return torch.where(ids < 0, -1, expert_map[ids.clamp_min(0).long()])


def clamped_swiglu_ref(gate_up, out, limit, topk_ids=None, expert_map=None):
    """See `clamped_swiglu`."""
    gate, up = gate_up.float().unflatten(1, (-1, 2)).unbind(-1)
    y = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    y = torch.nn.functional.pad(y, (0, out.shape[1] - y.shape[1])).to(out.dtype)
    here = slice(None) if expert_map is None else _local_experts(topk_ids, expert_map) >= 0
    out[here] = y[here]


def mxfp4_experts_decode_ref(
    x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, out, arrived, limit, expert_map=None
):
    """See `mxfp4_experts_decode`."""
    ids = topk_ids if expert_map is None else _local_experts(topk_ids, expert_map)
    inner = w13_scale.shape[2] // 2

    def matrices(expert):
        one = slice(expert, expert + 1)
        pairs = mxfp4_decode_ref(unpack(w13[one])[0], unpack_scales(w13_scale[one])[0])
        down = mxfp4_decode_ref(unpack(w2[one])[0], unpack_scales(w2_scale[one])[0])
        return torch.cat([pairs[::2], pairs[1::2]]), down[:, :inner].contiguous()

    out.copy_(_sum_of_experts(x, len(w13), matrices, topk_weights, ids, limit))


def expert_order_ref(order, ids, experts, padded, block_size, count, expert_map=None):
    """Fill each expert's places, one expert after the other."""
    own = ids.flatten().long()
    if expert_map is not None:
        own = _local_experts(own, expert_map)
    owners = experts[: int(padded) // block_size].tolist()
    for expert in range(count):
        if expert in owners:
            routes = (own == expert).nonzero()[:, 0]
            first = owners.index(expert) * block_size
            order[first : first + len(routes)] = routes.int()
