# SPDX-License-Identifier: Apache-2.0
"""Upstream's mHC kernels, as DeepSeek-V4.1 calls them where there is no DeepGEMM, against the references.

Two runs must give the same bits, the second on memory filled with NaN: none of these kernels sums with atomics.
"""

import importlib.util

import pytest
import torch

from vllm.ampere import envs
from vllm.ampere.kernels.mhc import mhc_post, mhc_post_pre, mhc_pre
from vllm.ampere.kernels.mhc.reference import mhc_post_ref, mhc_pre_ref
from vllm.ampere.kernels.registry import Case
from vllm.ampere.testing.parity import assert_parity, assert_same_bits, produce

ABSENT = [name for name in ("vllm.platforms", "tilelang") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")]
# Up to 32 tokens the projection reads the new streams before they are rounded to bfloat16, above that as stored.
UNROUNDED_TOKENS = 32
each_batch = pytest.mark.parametrize("tokens", [1, 6, 12, 16, 63, 4097, 16384])
each_hidden = pytest.mark.parametrize("hidden", [5120, 256])
NUMBERS = ("rms_eps", "pre_eps", "sinkhorn_eps", "post_alpha", "sinkhorn_iters")


@pytest.fixture(scope="module", autouse=True)
def without_deep_gemm():
    """The path of an Ampere card: on one, or by the emulation where `VLLM_AMPERE_ASSUME` asks for it."""
    if envs.assumed_architecture():
        from vllm.ampere.integration import emulate_sm80

        emulate_sm80.install()
    from vllm.utils.deep_gemm import is_deep_gemm_supported

    if is_deep_gemm_supported():
        pytest.skip("DeepGEMM serves this card: set VLLM_AMPERE_ASSUME")


def run_twice(op, upstream, **sizes):
    """Random arguments and what upstream makes of them, the same bits twice."""
    given = Case("", sizes, op.cases[0].make).inputs(sum(sizes.values()), "cuda")
    got = produce(op, upstream, given)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        again = produce(op, upstream, given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(again, got, op.name)
    return given, got


def assert_right(op, upstream, **sizes):
    given, got = run_twice(op, upstream, **sizes)
    assert_parity(op, got, produce(op, op.reference, given), op.name)


def upstream_pre(streams, fn, scale, base, pre_mix, norm_weight, norm_eps, x, **numbers):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_pre_delayed_tilelang

    rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns = (numbers[name] for name in NUMBERS)
    return mhc_pre_delayed_tilelang(
        streams, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns,
        pre_mix=pre_mix, x=x, norm_weight=norm_weight, norm_eps=norm_eps,
    )


def upstream_post_pre(
    y, streams, post, comb, fn, scale, base, pre_mix, norm_weight, norm_eps, capture_aux, **numbers
):
    from vllm.models.deepseek_v41.nvidia.ops.mhc import mhc_shifted_post_pre

    rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns = (numbers[name] for name in NUMBERS)
    return mhc_shifted_post_pre(
        y, streams, post, comb, fn, scale, base, rms_eps, pre_eps, sinkhorn_eps, post_alpha, turns,
        pre_mix=pre_mix, norm_weight=norm_weight, norm_eps=norm_eps, capture_aux=capture_aux,
    )


@each_batch
@each_hidden
def test_pre(tokens, hidden):
    assert_right(mhc_pre.OP, upstream_pre, T=tokens, D=hidden, first=False)


@each_batch
@pytest.mark.parametrize("hidden", [5120, 512])
def test_pre_of_the_first_layer(tokens, hidden):
    """Its projection reads one stream, 512 columns a turn; upstream asserts that they divide the hidden size."""
    assert_right(mhc_pre.OP, upstream_pre, T=tokens, D=hidden, first=True)


@each_batch
@each_hidden
@pytest.mark.parametrize("aux", [False, True])
def test_post_pre(tokens, hidden, aux, monkeypatch):
    """What follows the expansion is compared on upstream's own streams: a rounding apart is no fault of it."""
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", "mhc_post_pre=upstream")
    op = mhc_post_pre.OP
    given, got = run_twice(op, upstream_post_pre, T=tokens, D=hidden, aux=aux)
    y, streams, post, comb, capture = (given.pop(n) for n in ("y", "streams", "post", "comb", "capture_aux"))
    unrounded, stored = mhc_post_ref(y, streams.float(), post, comb), got["streams"]
    post, comb, layer_input, pre = mhc_pre_ref(stored, **given)
    if tokens <= UNROUNDED_TOKENS:
        post, comb, _, pre = mhc_pre_ref(unrounded, **given)
    aux = stored.float().mean(1).bfloat16() if capture else stored[:0, 0]
    want = (unrounded.bfloat16(), post, comb, layer_input, pre, aux)
    assert_parity(op, got, dict(zip((arg.name for arg in op.outputs), want)), op.name)


@each_batch
@each_hidden
def test_post(tokens, hidden):
    from vllm.model_executor.kernels.mhc.tilelang import mhc_post_tilelang

    def upstream(y, streams, post, comb):
        return mhc_post_tilelang(y, streams, post, comb)

    assert_right(mhc_post.MHC_POST, upstream, T=tokens, D=hidden)


@each_batch
@each_hidden
def test_collapse_before_the_head(tokens, hidden):
    from vllm.model_executor.kernels.mhc.triton import hc_collapse_triton

    def upstream(streams, mix):
        return hc_collapse_triton(streams, mix)

    assert_right(mhc_post.MHC_COLLAPSE, upstream, T=tokens, D=hidden)


def test_two_roundings_differ():
    """The control of `UNROUNDED_TOKENS`: with the other rounding the coefficients are out of tolerance."""
    given = Case("", {"T": 16, "D": 5120, "aux": False}, mhc_post_pre.OP.cases[0].make).inputs(9, "cuda")
    got, stored = (produce(mhc_post_pre.OP, f, given) for f in (upstream_post_pre, mhc_post_pre.OP.reference))
    with pytest.raises(AssertionError, match="post: relative norm"):
        assert_parity(mhc_post_pre.OP, got, stored)


def test_kernels_are_lowered_for_the_assumed_architecture():
    """TileLang's target and the source that it wrote; nothing in it is newer than the architecture."""
    if not envs.assumed_architecture():
        pytest.skip("the card itself is an Ampere card")
    from vllm.model_executor.kernels.mhc.warmup import MHC_PRE_NORM_KERNEL

    assert_right(mhc_pre.OP, upstream_pre, T=2, D=1024, first=False)
    compiled = list(MHC_PRE_NORM_KERNEL._compiled_cache.values())
    assert compiled
    newer = ("Barrier", "mbarrier", "tma_", "wgmma", "cluster", "pdl", "cudaGrid")
    for kernel in compiled:
        assert kernel.target.attrs["arch"] == envs.assumed_architecture().replace("sm", "sm_")
        assert not [word for word in newer if word in kernel.get_kernel_source()]
