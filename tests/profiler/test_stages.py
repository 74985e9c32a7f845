# SPDX-License-Identifier: Apache-2.0
"""The table of stages: every kernel of ours has one, and kernels of others have the one that they should."""

import re
from pathlib import Path

import pytest

from vllm.ampere import kernels
from vllm.ampere.profiler import stages

OVERLAY = Path(kernels.__file__).parents[1]


def test_every_triton_kernel_of_the_overlay_has_a_stage():
    """Found with a regular expression, so that the table's own reading of the source is checked too."""
    launched = set()
    for path in OVERLAY.rglob("*.py"):
        launched |= set(re.findall(r"^@(?:triton\.)?jit[^\n]*\ndef (\w+_kernel)\(", path.read_text(), re.MULTILINE))
    assert len(launched) >= 20
    assert {name: stages.by_name(name) for name in launched if stages.by_name(name) == stages.OTHER} == {}


def test_every_folder_of_kernels_is_a_family():
    folders = {path.name for path in (OVERLAY / "kernels").iterdir() if (path / "__init__.py").exists()}
    assert folders == set(stages.FAMILIES) and set(stages.FAMILIES.values()) < set(stages.STAGES)


@pytest.mark.parametrize("kernel, stage", [
    ("_mhc_post_kernel", "mHC"),
    ("mhc_pre_big_fuse_with_norm_tilelang_kernel", "mHC"),
    ("void marlin_moe_wna16::Marlin<16, 4>(int4 const*)", "routed experts"),
    ("void marlin::Marlin<16, 4>(int4 const*)", "dense"),
    ("void vllm::moe::topkGating<8, 384>(float const*)", "routed experts"),
    ("void vllm::moe::moe_align_block_size_kernel<int>", "routed experts"),
    ("void vllm::act_and_mul_kernel<c10::BFloat16>", "routed experts"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "dense"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "dense"),
    ("ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn", "dense"),
    ("void vllm::rms_norm_kernel<c10::BFloat16, 8>", "dense"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-reduce"),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>", "all-reduce"),
    ("_gumbel_sample_kernel", "sampler"),
    ("_topk_log_softmax_kernel", "sampler"),
    ("_rejection_kernel", "sampler"),
    ("_fused_engram_post_wkv_kernel", "engram"),
    ("_gather_lookback_kernel", "engram"),
    ("_prepare_dflash_inputs_kernel", "draft"),
    ("_fused_indexer_q_rope_quant_kernel", "indexer"),
    ("void vllm::topKPerRowDecode<1024>", "indexer"),
    ("void sm90::fp8_mqa_logits_kernel", "indexer"),
    ("_compute_slot_mappings_kernel", "attention"),
    ("_rope_quant_insert_kernel", "attention"),
    ("sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel", "attention"),
    ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", "other"),
    ("Memcpy DtoD (Device -> Device)", "other"),
])  # fmt: skip
def test_kernels_of_others(kernel, stage):
    assert stages.by_name(kernel) == stage


def test_an_own_name_wins_over_the_patterns_and_an_own_frame_over_the_name():
    assert stages.own_kernels()["_mqa_logits_kernel"] == "indexer"
    assert stages.by_name("_window_slots_kernel") == "attention"
    assert stages.by_name("_window_slots_kernel_of_another") == "other"
    assert stages.of("aten::mm", ("vllm/ampere/kernels/indexer/reference.py(5): scores",)) == "indexer"
    assert stages.of("aten::mm", ()) == "dense"
