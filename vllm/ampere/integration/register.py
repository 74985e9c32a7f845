# SPDX-License-Identifier: Apache-2.0
"""What vLLM's plugin loader calls in every process, before any model exists."""

from vllm.platforms import current_platform

from .. import envs


def register() -> None:
    """Put our checks before DeepSeek-V4.1 is loaded and, without a GPU, our bindings before it is built.

    On Ampere the patch series calls the integration directly; on newer cards the checks step aside.
    """
    from vllm.envs import environment_variables
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from . import emulate_sm80
    from .verify import AmpereDeepseekV41Config

    # vLLM warns of a VLLM_ name that it does not know, or refuses it.
    environment_variables.update(envs.readers())
    emulate_sm80.install()
    MODELS_CONFIG_MAP["DeepseekV41ForCausalLM"] = AmpereDeepseekV41Config
    if current_platform.is_cpu():
        _register_cpu(MODELS_CONFIG_MAP)


def _register_cpu(config_hooks: dict) -> None:
    from .cpu.platform import AmpereCpuPlatform

    if not isinstance(current_platform, AmpereCpuPlatform):
        return
    from vllm import ModelRegistry

    from .verify import OtherModelConfig

    others = set(ModelRegistry.get_supported_archs()) - {"DeepseekV41ForCausalLM", "DSparkV41DraftModel"}
    config_hooks.update(dict.fromkeys(others, OtherModelConfig))
    from vllm.model_executor.layers.quantization import register_quantization_config

    from .cpu import streams

    streams.install()  # the module imported next creates events
    from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

    # Off CUDA the name resolves to DeepSeek-V4's config, which does not know V4.1's 32x32 blocks.
    register_quantization_config("deepseek_v4_fp8")(DeepseekV4FP8Config)
    bindings = f"{__package__}.cpu.model"
    ModelRegistry.register_model("DeepseekV41ForCausalLM", f"{bindings}:DeepseekV41ForCausalLM")
    ModelRegistry.register_model("DSparkV41DraftModel", f"{bindings}:DSparkDeepseekV4ForCausalLM")
