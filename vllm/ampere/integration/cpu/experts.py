# SPDX-License-Identifier: Apache-2.0
"""Routed experts and the router on the reference ops."""

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ...kernels.moe.mxfp4_experts import mxfp4_experts
from ...kernels.moe.route import route


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


def route_tokens(
    router_logits, top_k, renormalize, e_score_correction_bias, routed_scaling_factor, input_ids, hash_indices_table
):
    """Stands for the AVX-512 router, which accepts 256 experts and no other count."""
    if hash_indices_table is not None:
        raise NotImplementedError("DeepSeek-V4.1 has no hash-routed layer")
    return route(router_logits.float(), e_score_correction_bias.float(), top_k, routed_scaling_factor)
