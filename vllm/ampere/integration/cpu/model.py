# SPDX-License-Identifier: Apache-2.0
"""Binds the reference ops to upstream's DeepSeek-V4.1 modules, then exports its classes.

The model registry names this module, so the bindings stand before any layer is built, in every process
that builds one and in no other.
"""

import torch

from . import experts, kernels, operators, runner_kernels, streams

streams.install()
operators.install()

import vllm.model_executor.kernels.linear as linear
import vllm.model_executor.layers.fused_moe.layer as moe_layer
import vllm.model_executor.layers.fused_moe.router.router_factory as router_factory
import vllm.model_executor.layers.quantization.modelopt as modelopt
import vllm.model_executor.layers.quantization.mxfp4 as mxfp4
import vllm.model_executor.layers.utils as layer_utils
import vllm.models.deepseek_v41.attention as attention
import vllm.models.deepseek_v41.common.engram as engram
import vllm.models.deepseek_v41.compressor as compressor
import vllm.models.deepseek_v41.nvidia.dspark as dspark
import vllm.models.deepseek_v41.nvidia.model as model
import vllm.v1.attention.backends.mla.compressor_utils as compressor_utils
import vllm.v1.attention.backends.mla.indexer as indexer
import vllm.v1.attention.backends.mla.sparse_swa as sparse_swa
import vllm.v1.attention.ops.metadata as metadata
import vllm.v1.sample.ops.topk_topp_sampler as topk_topp
import vllm.v1.worker.gpu.block_table as block_table
import vllm.v1.worker.gpu.buffer_utils as buffer_utils
import vllm.v1.worker.gpu.sample.logprob as logprob
import vllm.v1.worker.gpu.spec_decode.dflash.speculator as dflash
import vllm.v1.worker.utils as worker_utils
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig

from ...kernels.mhc.mhc_post import mhc_collapse, mhc_post


def replace(owner, name: str, value) -> None:
    """Replace a name that upstream defines; a name it no longer defines is a fault of ours."""
    if not hasattr(owner, name):
        place = getattr(owner, "__name__", owner)
        raise AttributeError(f"vLLM has no {name} in {place}: this overlay was written for 0.33.0")
    setattr(owner, name, value)


def _mxfp8_linear(*, weight_shape, bmm_batch_size=None):
    """Linears and grouped linears decode their weights to bfloat16 when they are loaded."""
    return EmulationMxfp8LinearKernel(Mxfp8LinearLayerConfig(weight_shape=weight_shape, bmm_batch_size=bmm_batch_size))


def _plain_linear(layer, remove_weight: bool) -> None:
    """Keep `layer.weight`: upstream's CPU path repacks it away, and the compressor and the gate read it."""
    layer.cpu_linear = torch.nn.functional.linear


for owner in (linear, modelopt):
    replace(owner, "init_mxfp8_linear_kernel", _mxfp8_linear)
replace(layer_utils, "dispatch_cpu_unquantized_gemm", _plain_linear)
replace(mxfp4, "select_deepseek_v4_mxfp4_moe_backend", experts.select_backend)
replace(router_factory, "CPURouter", experts.AmpereCpuRouter)
replace(moe_layer, "create_fused_moe_router", experts.create_router(moe_layer.create_fused_moe_router))
replace(model, "mhc_pre_delayed_tilelang", kernels.pre)
replace(model, "mhc_shifted_post_pre", kernels.post_pre)
for owner in (model, dspark):
    replace(owner, "mhc_post_tilelang", mhc_post)
    replace(owner, "hc_collapse_triton", mhc_collapse)
replace(attention, "fused_q_kv_rmsnorm", kernels.q_kv_rmsnorm)
replace(compressor, "fused_save_compress_norm", kernels.save_compress_norm)
replace(
    sparse_swa,
    "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL",
    kernels.WindowIndices(sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL),
)
# Kernels launched as `kernel[grid](...)`, and what is called instead.
LAUNCHED = (
    (attention, "_fill_short_context_topk_indices", kernels.fill_short_context),
    (engram, "_fused_engram_post_wkv_kernel", kernels.gate_and_inject),
    (engram, "_hash_ids_kernel", kernels.hash_ids),
    (block_table, "_gather_block_tables_kernel", runner_kernels.gather_block_tables),
    (block_table, "_compute_slot_mappings_kernel", runner_kernels.slot_mappings),
    (buffer_utils, "_apply_write_kernel", runner_kernels.apply_writes),
    (metadata, "_token_request_mapping_kernel", runner_kernels.token_requests),
    (sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL, "kernel", runner_kernels.gather_lens),
    (sparse_swa._COMPUTE_DSPARK_NONCAUSAL_SWA_INDICES_KERNEL, "kernel", runner_kernels.draft_window),
    (indexer._PREPARE_UNIFORM_DECODE_KERNEL, "kernel", runner_kernels.uniform_decode),
    (compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL, "kernel", runner_kernels.compressed_slots),
    (dflash, "_prepare_dflash_inputs_kernel", runner_kernels.draft_inputs),
    (logprob, "_topk_log_softmax_kernel", runner_kernels.token_logprobs),
    (logprob, "_ranks_kernel", runner_kernels.token_ranks),
)
for owner, name, function in LAUNCHED:
    replace(owner, name, runner_kernels.Launcher(function, getattr(owner, name, None)))
replace(worker_utils.KVBlockZeroer, "zero_block_ids", kernels.zero_blocks)
replace(topk_topp, "HAS_TRITON", False)  # the interpreter does not run its kernel; PyTorch's path is beside it

from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM  # noqa: E402,F401
from vllm.models.deepseek_v41.nvidia.dspark import DSparkDeepseekV4ForCausalLM  # noqa: E402,F401
