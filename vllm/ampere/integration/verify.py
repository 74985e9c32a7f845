# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is loaded: the processor, the patched tree, the checkpoint."""

from pathlib import Path

import vllm
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig, VerifyAndUpdateConfig

from .. import checkpoint, envs, upstream
from ..errors import CheckpointError, PatchError, SelectionError
from ..kernels.registry import all_ops
from ..patching import series, tree
from . import gate
from .failure import exit_on_error
from .pipeline import cuts


class AmpereDeepseekV41Config(DeepseekV4ForCausalLMConfig):
    """Upstream's config hook for DeepSeek-V4.1, with our checks behind it; runs in the front end."""

    @staticmethod
    @exit_on_error
    def verify_and_update_model_config(model_config) -> None:
        DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)
        if gate.architecture() is None:
            return
        require_patched(Path(vllm.__file__).parents[1])
        require_kernels(gate.architecture().name)

    @staticmethod
    @exit_on_error
    def verify_and_update_config(vllm_config) -> None:
        """Look at the pipeline's cuts, and at the checkpoint's shards where it is a path (else a hub name, which vLLM
        fetches) and will be read."""
        if gate.architecture() is None:
            return
        cuts.check(vllm_config)
        model, load_format = vllm_config.model_config.model, vllm_config.load_config.load_format
        if load_format != "dummy" and Path(model).exists():
            checkpoint.inspect(model)


class OtherModelConfig(VerifyAndUpdateConfig):
    """The config hook of every other model on the CPU platform, whose operators serve DeepSeek-V4.1 alone."""

    @staticmethod
    @exit_on_error
    def verify_and_update_model_config(model_config) -> None:
        raise CheckpointError(
            f"{model_config.model} holds {', '.join(model_config.architectures)}, not DeepSeek-V4.1",
            "without a GPU only DeepseekV41ForCausalLM is served; plain vLLM serves other models",
        )


def require_patched(root: Path) -> None:
    """Raise PatchError unless the vLLM tree below `root` carries the whole series.

    A tree that got the overlay from an exported patch holds no series: that patch brought both at once.
    """
    if not upstream.series_dir().is_dir():
        return
    patches = series.load(upstream.series_dir(), upstream.version())
    state = tree.summary(root, tree.survey(root, tree.series_changes(patches)))
    if state != "applied":
        raise PatchError(
            f"vLLM in {root} is not patched for Ampere: {state}", "run `vllm-ampere patches apply` with the server's Python"
        )


# What the integration calls on every processor; the CPU folder calls more.
ENGINE_OPS = (
    "sparse_mla_decode", "sparse_mla_prefill", "topk_slots", "inverse_rope", "compressor_insert", "key_norm_rope_store",
    "query_rope_quant", "paged_mqa_logits", "candidate_mqa_logits", "candidate_blocks", "select_topk", "engram_lookup",
    "expert_order", "gather_dequant", "combine_topk_swa", "sparse_mla_rows",
    "clamped_swiglu",
)  # fmt: skip
# Ops in whose place `VLLM_AMPERE_KERNELS` can leave upstream's; ours serve else, some for a part of the batches.
SWITCHED_OPS = ("markov_sampler", "mhc_post_pre", "mxfp4_experts_decode")


def require_kernels(architecture: str) -> None:
    """Raise SelectionError unless every op of the engine has an implementation here, by choice or by request."""
    unknown = sorted(envs.kernels().keys() - all_ops().keys() - {"*"})
    if unknown:
        raise SelectionError(f"VLLM_AMPERE_KERNELS names {unknown[0]}, which is no op", "`vllm-ampere kernels list` has them")
    ours = [name for name in SWITCHED_OPS if envs.kernels().get(name) != "upstream"]
    for name in (*ENGINE_OPS, *ours):
        all_ops()[name].choose_for(architecture)
