# SPDX-License-Identifier: Apache-2.0
"""The routed MXFP4 experts on Marlin, padded only where Marlin's tiles demand it.

Upstream rounds a rank's intermediate size up to 128 for gate, up and down alike: 288 to 384 at TP8. Here gate and up
keep their width and the inputs of the down projection are rounded up to 64 (`expert_layout`).
"""

import math

import torch
import vllm._custom_ops as ops
from torch.nn.functional import pad
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.fused_moe.utils import _resize_cache
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_input_dtype, get_marlin_workspace
from vllm.model_executor.utils import replace_parameter
from vllm.scalar_type import scalar_types

from .. import envs
from ..expert_layout import GROUP, down_inputs, fits
from ..kernels.moe.clamped_swiglu import clamped_swiglu
from ..kernels.moe.mxfp4_experts_decode import ARRIVAL_COUNTERS, MAX_TOKENS, faster_up_to, mxfp4_experts_decode
from ..kernels.moe.mxfp4_experts_decode import OP as DECODE
from . import warmup
from .experts import order_by_token

logger = init_logger(__name__)

# Marlin packs eight 4-bit values in a word and 16 inputs in a row of words.
_PACKED_INPUTS = 16
_BLOCK_ROWS = (8, 16, 32, 48, 64)


def declines(moe_config) -> str:
    """What `AmpereMarlinExperts` does not serve of what these experts ask for, or ""."""
    hidden, intermediate = moe_config.hidden_dim, moe_config.intermediate_size_per_partition
    reasons = {
        f"the activation {moe_config.activation.value}": moe_config.activation != MoEActivation.SILU,
        f"a hidden size of {hidden} and {intermediate} of the intermediate one": not fits(hidden, intermediate),
        "biases": moe_config.has_bias,
        "LoRA": moe_config.is_lora_enabled,
        "activations of 8 bits": get_marlin_input_dtype() is not None,
    }
    return ", ".join(reason for reason, there in reasons.items() if there)


class AmpereMxfp4MoEMethod(Mxfp4MoEMethod):
    """Upstream's method, with our width of the weights where it chooses Marlin and nothing else changed."""

    def __init__(self, moe_config, activation_key=None):
        super().__init__(moe_config, activation_key)
        self._ours = self.mxfp4_backend == Mxfp4MoeBackend.MARLIN
        if self._ours:
            self.experts_cls = AmpereMarlinExperts

    def maybe_roundup_sizes(self, *args, **kwargs):
        if self._ours:
            return FusedMoEMethodBase.maybe_roundup_sizes(self, *args, **kwargs)
        return super().maybe_roundup_sizes(*args, **kwargs)

    def _setup_kernel(self, layer, w13, w2, w13_scale, w2_scale, w13_bias=None, w2_bias=None):
        if self._ours:
            w13, w13_scale = pair_gate_up(w13), pair_gate_up(w13_scale)
        super()._setup_kernel(layer, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias)

    def _build_moe_kernel(self, layer):
        if self._ours:
            pad_down(layer)
        super()._build_moe_kernel(layer)


def pair_gate_up(rows: torch.Tensor) -> torch.Tensor:
    """[E, 2*I, X], I rows of gate before I of up -> the same with gate 0, up 0, gate 1, up 1, ..., newly allocated."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def pad_down(layer) -> None:
    """Pad the inputs of a repacked down projection with zeros, weights and scales, in Marlin's layout."""
    weight, scale = layer.w2_weight, layer.w2_weight_scale
    held = weight.shape[1] * _PACKED_INPUTS
    missing = down_inputs(held) - held
    if missing:
        replace_parameter(layer, "w2_weight", pad(weight, (0, 0, 0, missing // _PACKED_INPUTS)))
        padded = pad(scale.view(torch.uint8), (0, 0, 0, missing // GROUP)).view(scale.dtype)
        replace_parameter(layer, "w2_weight_scale", padded)


def decode_tokens(width: int, spread: bool) -> int:
    """Most tokens of a batch that `mxfp4_experts_decode` serves; Marlin serves larger ones.

    `VLLM_AMPERE_KERNELS` asks for Marlin alone with "mxfp4_experts_decode=upstream", and for all that the op can take
    with one of its implementations; default is `faster_up_to`.
    """
    asked = envs.kernels().get(DECODE.name)
    if asked is None:
        return faster_up_to(width, spread)
    return 0 if asked == "upstream" else MAX_TOKENS


class AmpereMarlinExperts(MarlinExperts):
    """Two Marlin products with our activation between them: w1 has pairs of gate and up, w2 padded inputs.

    `mxfp4_experts_decode` serves batches of up to `decode_tokens` in their place and from the same memory.
    """

    def process_weights_after_loading(self, layer) -> None:
        config, spread = self.moe_config, layer.expert_map is not None
        width = config.intermediate_size_per_partition
        self._arrived, self._decode_tokens = None, decode_tokens(width, spread)
        if self._decode_tokens:
            self._arrived = torch.zeros(ARRIVAL_COUNTERS, dtype=torch.int32, device=layer.w2_weight.device)
            warmup.compile_experts(config.hidden_dim, width, config.experts_per_token, spread, self._decode_tokens)
        logger.info_once(
            "Routed experts, %d wide%s: %s up to %d tokens, Marlin beyond",
            width, " and spread" if spread else "", DECODE.name, self._decode_tokens,
        )  # fmt: skip

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ) -> None:  # fmt: skip
        if self._uses_post_gemm2_hook(len(hidden_states)):
            raise NotImplementedError("a consumer of unweighted expert rows is not served on Ampere")
        tokens, limit = len(hidden_states), self.activation_config.clamp_limit
        limit = math.inf if limit is None else limit
        if self._arrived is not None and tokens <= self._decode_tokens and not apply_router_weight_on_input:
            mxfp4_experts_decode(
                hidden_states, w1, self.w1_scale.view(torch.uint8), w2, self.w2_scale.view(torch.uint8), topk_weights,
                topk_ids, output, self._arrived, limit, expert_map,
            )  # fmt: skip
            return
        marlin_experts(
            hidden_states, w1, self.w1_scale, w2, self.w2_scale, topk_weights, topk_ids, output, workspace13,
            workspace2, limit, global_num_experts, expert_map, apply_router_weight_on_input,
        )  # fmt: skip


def marlin_experts(
    x, w13, w13_scale, w2, w2_scale, topk_weights, topk_ids, out, inner_space, wide_space, limit,
    global_num_experts=-1, expert_map=None, weigh_input=False,
) -> None:  # fmt: skip
    """`mxfp4_experts_decode` for any number of tokens: sort, multiply, activate, multiply, sum.

    Args:
        inner_space: bfloat16, room for [T*K, inputs of w2].
        wide_space: bfloat16, room for [T*K, the wider of w13's outputs and D].
        global_num_experts: experts of all ranks; -1: as many as here.
        weigh_input: apply the router's weights before the activation.
        The others are those of `mxfp4_experts_decode`, scales as float8_e8m0fnu.
    """
    (tokens, hidden), experts, chosen = x.shape, w13.shape[0], topk_ids.shape[1]
    everywhere = global_num_experts if global_num_experts != -1 else experts
    block_rows = _block_rows(math.ceil(tokens * experts / everywhere) * chosen / experts)
    routing = moe_align_block_size(topk_ids, block_rows, everywhere, expert_map, ignore_invalid_experts=True)
    order, owners, padded = routing
    order_by_token(order, topk_ids, owners, padded, block_rows, experts, expert_map)
    locks = get_marlin_workspace(x.device)

    def multiply(a, weight, scale, c, rows_of_a, weighted):
        ops.moe_wna16_marlin_gemm(
            a, c, weight, None, scale, None, None, None, locks, *routing, topk_weights,
            moe_block_size=block_rows, top_k=rows_of_a, mul_topk_weights=weighted,
            b_q_type=scalar_types.float4_e2m1f, size_m=a.shape[0], size_n=c.shape[1], size_k=a.shape[1],
            use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False,
        )  # fmt: skip

    rows = tokens * chosen
    gate_up = _resize_cache(wide_space, (rows, w13.shape[2] // 2))
    inner = _resize_cache(inner_space, (rows, w2.shape[1] * _PACKED_INPUTS))
    multiply(x, w13, w13_scale, gate_up, chosen, weigh_input)
    ids = None if expert_map is None else topk_ids
    clamped_swiglu(gate_up, inner, limit, None if ids is None else ids.flatten(), expert_map)
    product = _resize_cache(wide_space, (rows, hidden))
    multiply(inner, w2, w2_scale, product, 1, not weigh_input)
    ops.moe_sum(product.view(tokens, chosen, hidden), out, ids, expert_map)


def _block_rows(rows_an_expert: float) -> int:
    """Upstream's choice: the least block that an expert with the average number of rows does not fill to nine tenths."""
    return next((rows for rows in _BLOCK_ROWS if rows_an_expert / rows < 0.9), _BLOCK_ROWS[-1])
