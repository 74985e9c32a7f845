# SPDX-License-Identifier: Apache-2.0
"""Routed experts and the router on the reference ops."""

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ...kernels.moe.mxfp4_experts import mxfp4_experts
from ...kernels.moe.route import route

# Consecutive token ids that mark the places of an image.
IMAGE_IDS = 5


class AmpereMxfp4Experts(mk.FusedMoEExpertsModular):
    """Packed FP4 experts, decoded as they are used; the weighted sum is done here."""

    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)
    _supports_current_device = staticmethod(lambda: True)
    _supports_no_act_and_mul = staticmethod(lambda: False)
    _supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)
    _supports_activation = staticmethod(lambda activation: True)
    _supports_parallel_config = staticmethod(lambda config: True)

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def workspace_shapes(self, M, N, K, *args, **kwargs):
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def process_weights_after_loading(self, layer) -> None:
        self._scales = layer.w13_weight_scale, layer.w2_weight_scale

    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs) -> None:
        w13_scale, w2_scale = self._scales
        limit = self.quant_config.gemm1_clamp_limit
        output.copy_(mxfp4_experts(hidden_states, w1, w13_scale, w2, w2_scale, topk_weights, topk_ids, limit))


def select_backend(config):
    """Stands for upstream's choice of an MXFP4 backend: ours is the only one on a CPU."""
    return Mxfp4MoeBackend.EMULATION, AmpereMxfp4Experts


class AmpereCpuRouter(CPURouter):
    """Upstream's AVX-512 router accepts 256 experts and no other count, and has no bias for image tokens."""

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        image = None
        if self.bias_vl is not None:
            image = (input_ids >= self.image_sentinel_lo) & (input_ids < self.image_sentinel_lo + IMAGE_IDS)
        return route(
            router_logits.float(), self.e_score_correction_bias.float(), self.top_k, self.routed_scaling_factor,
            self.bias_vl, image,
        )  # fmt: skip


def create_router(upstream):
    """Upstream's router factory, with the image bias that it drops on a CPU."""

    def create(*args, bias_vl=None, image_sentinel_lo=0, **kwargs):
        router = upstream(*args, **kwargs)
        router.bias_vl, router.image_sentinel_lo = bias_vl, image_sentinel_lo
        return router

    return create
