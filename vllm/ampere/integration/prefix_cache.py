# SPDX-License-Identifier: Apache-2.0
"""From which length on a prompt can hit the prefix cache, and which cache group ends a hit.

V4.1 keeps several kinds of rows, each in groups with pages of their own. A hit ends where all groups have a page's
end; with bounded replay its last window is computed again, and a hit that is no longer than the window is not taken.
The last token of a prompt is always computed. A shorter prompt never hits, however often it is sent.
"""

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

logger = init_logger(__name__)


def report(coordinator) -> None:
    """Log the step of hits and the smallest prompt that can hit.

    Args:
        coordinator: vLLM's hybrid cache coordinator, with its groups split.
    """
    step = coordinator._cache_hit_alignment_tokens
    managers, groups = coordinator.single_type_managers, coordinator.kv_cache_config.kv_cache_groups
    replay_tokens = max(group.kv_cache_spec.prefix_replay_tokens for group in groups)
    # Speculative decoding looks one page of the draft's group further and gives that page up.
    draft_pages = [managers[group.group_ids[0]].block_size for group in coordinator.attention_groups if group.use_eagle]
    logger.info(
        "Prefix cache: %d groups with pages of %s tokens; hits come in steps of %d tokens, "
        "and the smallest prompt that can hit has %d",
        len(groups),
        ", ".join(str(tokens) for tokens in sorted({manager.block_size for manager in managers})),
        step,
        (replay_tokens // step + 1) * step + max(draft_pages, default=1),
    )


def find_group_hits(coordinator, request, limit_tokens: int, found_tokens: int) -> None:
    """Note on a request what each cache group, asked alone, could serve now: before the request takes any block.

    Groups that are never shared (windows with bounded replay, compressor rings) end no hit and are left out; so is
    everything of a model with one group, whose hits vLLM counts itself.

    Args:
        coordinator: vLLM's cache coordinator.
        limit_tokens: the longest hit that the request may take.
        found_tokens: the hit of all groups together.
    """
    if not hasattr(coordinator, "attention_groups"):
        return
    groups = coordinator.kv_cache_config.kv_cache_groups
    if len(coordinator.attention_groups) == 1:
        tokens = [found_tokens] * len(groups)
    else:
        _, tokens = coordinator.find_longest_cache_hit_per_group(request.block_hashes, limit_tokens)
    request.prefix_group_hits = {
        (str(group), get_kv_cache_spec_kind(groups[group].kv_cache_spec).value): tokens[group]
        for spec_group in coordinator.attention_groups
        for group in spec_group.group_ids
    }


def count_group_hits(stats, request) -> None:
    """Add a scheduled request's group hits to `hits_by_group` of the statistics; as vLLM's `hits`, first runs only."""
    if request.num_preemptions:
        return
    for group, tokens in getattr(request, "prefix_group_hits", {}).items():
        stats.hits_by_group[group] = stats.hits_by_group.get(group, 0) + tokens
