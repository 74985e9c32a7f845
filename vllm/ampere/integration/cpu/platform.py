# SPDX-License-Identifier: Apache-2.0
"""The CPU platform that serves DeepSeek-V4.1 with the reference ops."""

from pathlib import Path

import vllm
from vllm.platforms import builtin_platform_plugins
from vllm.platforms.cpu import CpuPlatform

from ... import envs

# One page of compressed records; the same as on Ampere cards.
BLOCK_TOKENS = 128


def detect() -> str | None:
    """Entry point of vLLM's platform plugins: our platform's name, or None to leave the choice to vLLM.

    It is ours where no accelerator is found and the CPU operators are built, or where
    `VLLM_AMPERE_PLATFORM=cpu` asks for it.
    """
    name = f"{__name__}.AmpereCpuPlatform"
    if envs.platform() == "cpu":
        return name
    accelerator = any(builtin_platform_plugins[kind]() for kind in ("cuda", "rocm", "xpu", "tpu"))
    cpu_operators = list(Path(vllm.__file__).parent.glob("_C.*so"))
    return name if cpu_operators and not accelerator else None


class AmpereCpuPlatform(CpuPlatform):
    """CpuPlatform without the limits that its own latent attention sets."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return f"{__package__}.communicator.AmpereCpuCommunicator"

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = (scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching)
        asynchronous = scheduler.async_scheduling
        with envs.forks():  # a spawned process imports PyTorch and vLLM again
            super().check_and_update_config(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            # The order of batches over stages is scheduled as on cards; one process has nothing to overlap.
            scheduler.async_scheduling = asynchronous
        cache.block_size = BLOCK_TOKENS
