# SPDX-License-Identifier: Apache-2.0
"""Checks before anything is loaded: the processor, the patched tree, the checkpoint."""

from pathlib import Path

import vllm
from vllm.model_executor.models.config import DeepseekV4ForCausalLMConfig

from .. import checkpoint, upstream
from ..errors import PatchError
from ..patching import series, tree
from . import gate
from .failure import exit_on_error


class AmpereDeepseekV41Config(DeepseekV4ForCausalLMConfig):
    """Upstream's config hook for DeepSeek-V4.1, with our checks behind it; runs in the front end."""

    @staticmethod
    @exit_on_error
    def verify_and_update_model_config(model_config) -> None:
        DeepseekV4ForCausalLMConfig.verify_and_update_model_config(model_config)
        if gate.architecture() is None:
            return
        require_patched(Path(vllm.__file__).parents[1])
        # Anything that is not a path here is a hub name, which vLLM fetches later.
        if Path(model_config.model).exists():
            checkpoint.inspect(model_config.model)


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
