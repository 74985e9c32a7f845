# SPDX-License-Identifier: Apache-2.0
"""Which stage of the model a kernel belongs to, by its name and, where a trace has them, by the frames around it.

A captured graph replays kernels without any frame, so there the name is all there is. One name may serve several
stages: a GEMM counts as dense although the shared expert and the draft's layers launch it too, an activation counts
with the routed experts, and the draft's attention counts as attention.
"""

import ast
import functools
import re
from pathlib import Path

STAGES = (
    "attention", "indexer", "mHC", "routed experts", "shared expert", "dense", "engram", "draft", "sampler",
    "all-reduce", "other",
)  # fmt: skip
OTHER = "other"
# Folder below `kernels/` -> stage of the kernels in it.
FAMILIES = {
    "attention": "attention", "kv_cache": "attention", "indexer": "indexer", "mhc": "mHC", "moe": "routed experts",
    "quantization": "dense", "engram": "engram", "spec_decode": "draft",
}  # fmt: skip
_KERNELS = Path(__file__).resolve().parents[1] / "kernels"
# Between the two GEMMs of an expert, routed or shared.
_ACTIVATION = r"act_and_mul|silu_and_mul|swiglu"
# Kernels that are not ours; the first pattern found anywhere in the name decides.
_NAMES = tuple((stage, re.compile(pattern, re.IGNORECASE)) for stage, pattern in (
    ("all-reduce", r"nccl|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|multimem|gloo:|shm_(all|gather)"),
    ("mHC", r"mhc_|hc_prenorm|hc_head"),
    ("engram", r"engram|_gather_lookback|_write_hash_cache|_peer_lookup"),
    ("indexer", r"mqa_logits|indexer|candidate|top_?k_?per_?row|persistent_?topk|topk_transform|"
                r"fill_short_context_topk|cooperative_topk"),
    ("draft", r"markov|dspark|dflash|draft|eagle|speculat"),
    ("routed experts", r"moe|dsv4_topk|topk_?gating|topk_?(softmax|sigmoid|softplus)|expert|grouped_topk"),
    ("routed experts", _ACTIVATION),
    ("sampler", r"sampl|gumbel|topk_topp|_temperature_kernel|log_?softmax|logprob|penalties|_min_p_|bad_words|"
                r"_ranks_kernel|rejection|argmax|grammar|^_?bias_kernel"),
    ("attention", r"flash|fmha|attn|attention|mla_|_mla|_swa_|compress|rope|rotary|kv_insert|kv_cache|gather_k_|"
                  r"dequant_gather|insert_k|global_topk_indices|zero_kv_blocks|slot_mapping|block_tables|save_ring_rows"),
    ("dense", r"gemm|gemv|cublas|cutlass|marlin|nvjet|xmma|split_?k|rms_?norm|scaled_mm|fp8_quant|"
              r"::(mm|bmm|addmm|linear|matmul|_scaled_mm|onednn_mm)$"),
))  # fmt: skip
# Python frames and modules, as torch's profiler writes them.
_FRAMES = tuple((stage, re.compile(pattern)) for stage, pattern in (
    ("shared expert", r"nn\.Module: DeepseekV4MLP|shared_experts"),
    ("draft", r"dspark|DSpark|worker/gpu/spec_decode/"),
    ("sampler", r"worker/gpu/sample/|v1/sample/"),
    ("engram", r"[Ee]ngram"),
    ("indexer", r"indexer|Indexer"),
    ("mHC", r"/mhc|hyper_connection"),
    ("routed experts", r"fused_moe|FusedMoE|integration/experts"),
    ("attention", r"compressor|deepseek_v41/attention|integration/attention|nn\.Module: \w*Attention"),
    ("dense", r"layers/linear|nn\.Module: \w*Linear"),
))  # fmt: skip
_OWN_FRAME = re.compile(r"ampere/kernels/(\w+)/")


@functools.cache
def own_kernels() -> dict[str, str]:
    """Name -> family of every Triton function of the overlay, read from the source: Triton need not be there."""
    found = {}
    for path in _KERNELS.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found[node.name] = path.parent.name
    return found


@functools.cache
def by_name(kernel: str) -> str:
    """The stage of a kernel or CPU operator, "other" for one that the table does not know."""
    if family := own_kernels().get(kernel):
        return FAMILIES[family]
    return next((stage for stage, pattern in _NAMES if pattern.search(kernel)), OTHER)


@functools.cache
def _by_own_frame(frame: str) -> str | None:
    own = _OWN_FRAME.search(frame)
    return FAMILIES.get(own[1]) if own else None


@functools.cache
def _by_frame(frame: str) -> str | None:
    return next((stage for stage, pattern in _FRAMES if pattern.search(frame)), None)


def of(kernel: str, frames: tuple[str, ...]) -> str:
    """The stage of a kernel that was launched below `frames`.

    Args:
        kernel: its name.
        frames: names of the Python frames and modules around the launch, outermost first; empty where none are known.
    """
    if own := [stage for frame in frames if (stage := _by_own_frame(frame))]:
        return own[-1]
    named = by_name(kernel)
    around = [stage for frame in frames if (stage := _by_frame(frame))]
    if named == "dense" or re.search(_ACTIVATION, kernel):
        return next((stage for stage in ("draft", "shared expert") if stage in around), named)
    return around[-1] if named == OTHER and around else named
