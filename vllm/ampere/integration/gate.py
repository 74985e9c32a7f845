# SPDX-License-Identifier: Apache-2.0
"""Which processors take our path; everything else keeps upstream's."""

import functools

from vllm.logger import init_logger
from vllm.platforms import current_platform

from .. import arch
from ..arch import Architecture

logger = init_logger(__name__)


@functools.cache
def architecture() -> Architecture | None:
    """The architecture whose path this process takes, or None where upstream's own path is right.

    Raises:
        UnsupportedDeviceError: a CUDA device that neither we nor upstream can serve.
    """
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        return None if capability is None else arch.of_capability(capability.major, capability.minor)
    if current_platform.is_cpu():
        from .cpu.platform import AmpereCpuPlatform

        return arch.CPU if isinstance(current_platform, AmpereCpuPlatform) else None
    return None


def attention_class(vllm_config):
    """The attention class of a DeepSeek-V4.1 layer, or None for upstream's choice.

    Raises:
        NotImplementedError: prefill context parallelism, whose exchange only FlashMLA's layer has.
    """
    if architecture() is None:
        return None
    if vllm_config.parallel_config.prefill_context_parallel_size > 1:
        raise NotImplementedError("prefill context parallelism is not available on Ampere; leave it at 1")
    from .attention import AmpereDeepseekV4Attention

    return AmpereDeepseekV4Attention


def expert_method(moe_config):
    """The method class of a layer's MXFP4 experts, or None for upstream's choice."""
    if architecture() in (None, arch.CPU):
        return None
    from .marlin_experts import AmpereMxfp4MoEMethod, declines

    if reason := declines(moe_config):
        logger.warning_once("experts keep upstream's padding: ours does not serve %s", reason)
        return None
    return AmpereMxfp4MoEMethod
