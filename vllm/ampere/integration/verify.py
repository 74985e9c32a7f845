# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is loaded: the processor, the patched tree, the checkpoint."""

from pathlib import Path

from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig

from .. import checkpoint, patching
from . import gate
from .failure import exit_on_error


class AmpereDeepseekV41Config(DeepseekV4ForCausalLMConfig):
    """Upstream's config hook for DeepSeek-V4.1, with our checks behind it; runs once, in the front end."""

    @staticmethod
    @exit_on_error
    def verify_and_update_model_config(model_config) -> None:
        DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)
        if gate.architecture() is None:
            return
        patching.require_applied()
        # Anything that is not a path here is a hub name, which vLLM fetches later.
        if Path(model_config.model).exists():
            checkpoint.inspect(model_config.model)
