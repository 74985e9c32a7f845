# SPDX-License-Identifier: Apache-2.0
"""The mHC family in plain PyTorch, float32 (model_spec section 4, mHC)."""

import torch

from ..rms_norm import rms_norm
from ..row_tiles import pad_rows, row_matmul

STREAMS = 4


def _mix(x, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters):
    """pre [T, 4], post [T, 4] and comb [T, 4, 4] (row: source stream, column: destination) of x [T, K]."""
    tokens, x = x.shape[0], pad_rows(x.float())
    z = row_matmul(x, fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + rms_eps)
    parts = zip(z.split((STREAMS, STREAMS, STREAMS**2), -1), scale, base.split((STREAMS, STREAMS, STREAMS**2)))
    pre, post, comb = (part * factor + offset for part, factor, offset in parts)
    comb = torch.softmax(comb.unflatten(-1, (STREAMS, STREAMS)), -1) + sinkhorn_eps
    comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + sinkhorn_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + sinkhorn_eps)
    return (torch.sigmoid(pre) + pre_eps)[:tokens], (torch.sigmoid(post) * post_alpha)[:tokens], comb[:tokens]


def mhc_collapse_ref(streams, mix):
    """See `mhc_collapse`."""
    return sum(mix[:, j, None] * streams[:, j].float() for j in range(STREAMS)).to(streams.dtype)


def mhc_post_ref(y, streams, post, comb):
    """See `mhc_post`."""
    y, x = y.float(), streams.float()
    mixed = [
        sum(comb[:, j, k, None] * x[:, j] for j in range(STREAMS)) + post[:, k] * y for k in range(STREAMS)
    ]
    return torch.stack(mixed, 1).to(streams.dtype)


def mhc_pre_ref(
    streams, fn, scale, base, pre_mix, norm_weight,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps, x=None,
):
    """See `mhc_pre`."""
    source = streams.flatten(1) if x is None else x
    pre, post, comb = _mix(source, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters)
    layer_input = streams[:, 0].contiguous() if pre_mix is None else mhc_collapse_ref(streams, pre_mix)
    if norm_weight is not None:
        layer_input = rms_norm(layer_input, norm_weight, norm_eps).to(streams.dtype)
    return post.unsqueeze(-1), comb, layer_input, pre


def mhc_post_pre_ref(
    y, streams, post, comb, fn, scale, base, pre_mix, norm_weight,
    rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps, capture_aux=False,
):
    """See `mhc_post_pre`."""
    streams = mhc_post_ref(y, streams, post, comb)
    outputs = mhc_pre_ref(
        streams, fn, scale, base, pre_mix, norm_weight,
        rms_eps, pre_eps, sinkhorn_eps, post_alpha, sinkhorn_iters, norm_eps,
    )
    aux = streams.float().mean(1).to(streams.dtype) if capture_aux else streams.new_empty(0, streams.shape[-1])
    return streams, *outputs, aux
