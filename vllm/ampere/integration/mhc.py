# SPDX-License-Identifier: Apache-2.0
"""The boundary between two sublayers: ours for batches that it computes faster, upstream's TileLang for the others."""

from collections.abc import Callable

from .. import envs
from ..kernels.mhc.mhc_post_pre import mhc_post_pre
from . import gate

# Tokens of a batch: ours serve up to the first number and from the second on, upstream's between them, as raced
# (docs/en/kernels/mhc.md).
_OURS_UP_TO, _OURS_FROM = 12, 33


def serves(tokens: int) -> bool:
    """Whether `post_pre` computes the boundary of a batch.

    `VLLM_AMPERE_KERNELS` asks for upstream's function alone with "mhc_post_pre=upstream", and for ours alone with one of
    its implementations; default is what was faster at so many tokens.
    """
    if gate.architecture() is None:
        return False
    asked = envs.kernels().get("mhc_post_pre")
    if asked is None:
        return not _OURS_UP_TO < tokens < _OURS_FROM
    return asked != "upstream"


def boundary(upstream: Callable) -> Callable:
    """What computes a boundary: `post_pre` or upstream's function, by the tokens of its first argument."""

    def chosen(x, *arguments, **named):
        return (post_pre if serves(len(x)) else upstream)(x, *arguments, **named)

    return chosen


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
