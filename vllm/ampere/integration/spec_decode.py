# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft block on our sampler."""

import torch
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.logger import init_logger

from .. import envs
from ..kernels.spec_decode.markov_sampler import markov_sampler
from . import gate

logger = init_logger(__name__)


def upstream_asked() -> bool:
    """Whether `VLLM_AMPERE_KERNELS` has "markov_sampler=upstream", which keeps upstream's loop."""
    return envs.kernels().get("markov_sampler") == "upstream"


def sample_sequential(speculator, num_reqs: int, head_hidden: torch.Tensor) -> bool:
    """Sample the draft block of every request into `speculator.draft_tokens`, if our sampler does what was asked.

    Greedy drafts of several tensor ranks are chosen from this rank's shard of the vocabulary, and no logits are
    gathered; sampled ones need the logits of all tokens for their verification, so that those are.

    Args:
        speculator: upstream's DSparkSpeculator, after the draft model ran.
        num_reqs: rows, with the padded ones of a graph.
        head_hidden: bfloat16 [T, D]; what the draft model returned.

    Returns:
        Whether they were sampled; False leaves them to upstream's loop.
    """
    if gate.architecture() is None:
        return False
    if reason := _left_to_upstream(speculator):
        logger.info_once("Drafts are sampled by upstream's loop: %s", reason)
        return False
    model, steps = speculator.model, speculator.num_speculative_steps
    rows = slice(num_reqs * steps)
    hidden = head_hidden[speculator.sample_indices[rows]]
    embed, head = _weights(model)
    if model.lm_head.tp_size == 1 or speculator.draft_logits is not None:
        logits, first, exchange = model.compute_draft_logits(hidden), 0, None
    else:
        logits = model.logits_processor(model.lm_head, model.model.norm(hidden), skip_gather=True)
        shard = model.lm_head.shard_indices
        first, exchange = shard.org_vocab_start_index, gather_words
        head = head[first : shard.org_vocab_end_index]
    speculator.draft_tokens[:num_reqs] = markov_sampler(
        logits[:, : len(head)].unflatten(0, (num_reqs, steps)), embed, head,
        speculator.input_buffers.input_ids[speculator._anchor_idx[:num_reqs]],
        speculator.sample_idx_mapping[rows].view(num_reqs, steps), speculator.sample_pos[rows].view(num_reqs, steps),
        speculator.temperature, speculator.seeds, speculator.draft_logits, first, exchange,
    )  # fmt: skip
    return True


def gather_words(words: torch.Tensor) -> torch.Tensor:
    """int64 [R] of every tensor rank, as [G, R]; bytes under a type that every communicator gathers."""
    return tensor_model_parallel_all_gather(words.view(torch.float32)[None], 0).view(torch.int64)


def _weights(model) -> tuple[torch.Tensor, torch.Tensor]:
    head = model.model.markov_head
    return head.markov_w1.weight, head.markov_w2.weight[: model.logits_processor.org_vocab_size]


def _left_to_upstream(speculator) -> str:
    """What was asked that our sampler does not do, or ""."""
    model, drafts = speculator.model, speculator.draft_logits
    if upstream_asked():
        return "VLLM_AMPERE_KERNELS asks for it"
    if speculator.draft_watermarker is not None:
        return "drafts are watermarked"
    if speculator.use_confidence_head or speculator.acceptance_estimator is not None:
        return "adaptive verification reads what every step scored"
    if drafts is not None and speculator.use_fp64_gumbel:
        return "noise in float64"
    processor = model.logits_processor
    types = {weight.dtype for weight in _weights(model)} | {processor.head_dtype or torch.bfloat16}
    if (types if drafts is None else types | {drafts.dtype}) != {torch.bfloat16}:
        return "logits are not bfloat16"
    if processor.soft_cap is not None or processor.scale != 1.0:
        return "logits are scaled"
    return ""
