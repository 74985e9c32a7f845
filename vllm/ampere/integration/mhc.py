# SPDX-License-Identifier: Apache-2.0
"""The boundary between two sublayers on our op, where it is asked for."""

from collections.abc import Callable

from .. import envs
from ..kernels.mhc.mhc_post_pre import mhc_post_pre
from . import gate


def asked() -> bool:
    """Whether `VLLM_AMPERE_KERNELS` names an implementation of `mhc_post_pre`; upstream's TileLang serves else."""
    return gate.architecture() is not None and envs.kernels().get("mhc_post_pre", "upstream") != "upstream"


def boundary(upstream: Callable) -> Callable:
    """What computes a boundary: `post_pre` where it is asked for, else upstream's function."""
    return post_pre if asked() else upstream


def post_pre(
    x, residual, post, comb, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_alpha, iters,
    pre_mix=None, norm_weight=None, norm_eps=1e-6, capture_aux=False,
):  # fmt: skip
    """`mhc_post_pre` under upstream's argument order."""
    return mhc_post_pre(
        x, residual, post, comb, fn, scale, base, pre_mix, norm_weight,
        rms_eps=rms_eps, pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_alpha=post_alpha,
        sinkhorn_iters=iters, norm_eps=norm_eps, capture_aux=capture_aux,
    )  # fmt: skip
