# SPDX-License-Identifier: Apache-2.0
"""Where this engine's pipeline is cut, and what cannot run beside a cut that relays."""

from dataclasses import fields

from vllm.distributed.utils import get_pp_indices

from ...errors import UsageError
from ...model_spec import ModelSpec
from ...pipeline_cut import Cut, cut_at


def model_spec(config) -> ModelSpec:
    """The layer map of a loaded config; what it does not name at its top (rotary, vision) keeps the release's value."""
    given = {field.name: getattr(config, field.name) for field in fields(ModelSpec) if hasattr(config, field.name)}
    return ModelSpec(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


def relayed_cuts(vllm_config) -> list[Cut]:
    """The cuts of this engine's pipeline at which more than the streams has to cross."""
    spec, stages = model_spec(vllm_config.model_config.hf_config), vllm_config.parallel_config.pipeline_parallel_size
    starts = [get_pp_indices(spec.num_hidden_layers, stage, stages)[0] for stage in range(stages)]
    return [cut for cut in (cut_at(spec, start) for start in starts) if cut is not None]


def check(vllm_config) -> None:
    """Raise UsageError where a stage starts inside a KV-sharing group and an option cannot go with that."""
    if vllm_config.parallel_config.pipeline_parallel_size == 1 or not (cuts := relayed_cuts(vllm_config)):
        return
    parallel = vllm_config.parallel_config
    refused = {
        "microbatches": (parallel.use_ubatching, "selections are kept once a rank, not once a microbatch"),
        "a KV connector": (vllm_config.kv_transfer_config is not None, "its peers do not know the copy of a source's cache"),
        "LoRA": (vllm_config.lora_config is not None, "the copy of a source's key weights takes no adapter"),
        "decode context parallelism": (parallel.decode_context_parallel_size > 1, "a copy of a cache is not split over ranks"),
    }
    for what, (asked, why) in refused.items():
        if asked:
            raise UsageError(
                f"{what} cannot run with a pipeline stage that starts at layer {cuts[0].start}: {why}",
                "leave the option out, or cut the pipeline only where `vllm-ampere plan --all` needs no relay",
            )
