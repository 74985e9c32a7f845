# SPDX-License-Identifier: Apache-2.0
"""The hook that samples a draft block: when it takes over, what it hands to the sampler, and what it leaves alone."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm.platforms", reason="needs the engine environment, .venv")

from benchmarks.rivals import upstream_loop
from vllm.ampere.integration import gate, spec_decode
from vllm.ampere.integration.warmup import DRAFT_KERNELS
from vllm.ampere.kernels.registry import Case
from vllm.ampere.kernels.spec_decode.markov_sampler import OP
from vllm.ampere.kernels.spec_decode.reference import best_word

VOCAB, STEPS, HIDDEN = 96, 5, 48


def given_block(seed, drafts=False, requests=4):
    return Case("", {"R": requests, "S": STEPS, "V": VOCAB, "F": 16, "drafts": drafts}, OP.cases[0].make).inputs(seed)


def speculator_of(given, rank=0, ranks=1, padding=0):
    """What the hook reads of upstream's speculator; the draft model returns the logits of tokens as hidden states."""
    requests = len(given["base_logits"])
    share = VOCAB // ranks
    head = SimpleNamespace(
        markov_w1=SimpleNamespace(weight=given["embed"]),
        markov_w2=SimpleNamespace(weight=torch.nn.functional.pad(given["head"], (0, 0, 0, 32), value=torch.nan)),
    )

    def processor(lm_head, hidden, skip_gather):
        assert skip_gather and lm_head is model.lm_head
        return torch.nn.functional.pad(hidden[:, rank * share : (rank + 1) * share], (0, padding), value=torch.inf)

    processor.org_vocab_size, processor.head_dtype = VOCAB, torch.bfloat16
    processor.soft_cap, processor.scale = None, 1.0
    shard = SimpleNamespace(org_vocab_start_index=rank * share, org_vocab_end_index=(rank + 1) * share)
    model = SimpleNamespace(
        model=SimpleNamespace(markov_head=head, norm=lambda hidden: hidden), logits_processor=processor,
        lm_head=SimpleNamespace(tp_size=ranks, shard_indices=shard), compute_draft_logits=lambda hidden: hidden,
    )
    # The block's rows lie in any order among those of the forward pass.
    order = torch.randperm(requests * STEPS, generator=torch.Generator().manual_seed(1))
    hidden = torch.empty(requests * STEPS, VOCAB, dtype=torch.bfloat16)
    hidden[order] = given["base_logits"].flatten(0, 1)
    return hidden, SimpleNamespace(
        model=model, num_speculative_steps=STEPS, sample_indices=order, draft_logits=given["draft_logits"],
        sample_idx_mapping=given["request"].flatten(), sample_pos=given["position"].flatten(),
        temperature=given["temperature"], seeds=given["seeds"], _anchor_idx=torch.arange(0, requests * STEPS, STEPS),
        input_buffers=SimpleNamespace(input_ids=given["last_token"].repeat_interleave(STEPS).int()),
        draft_tokens=torch.full((requests + 2, STEPS), -7), draft_watermarker=None, use_confidence_head=False,
        acceptance_estimator=None, use_fp64_gumbel=False,
    )


def sampled_upstream(given):
    call, result = upstream_loop(given)
    call()
    return result(None)


def test_greedy_block_is_upstreams():
    given = given_block(1)
    hidden, speculator = speculator_of(given)
    assert spec_decode.sample_sequential(speculator, 4, hidden)
    assert torch.equal(speculator.draft_tokens[:4], sampled_upstream(given))
    assert (speculator.draft_tokens[4:] == -7).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_sample_from_shards_and_meet_over_words(rank, monkeypatch):
    """Each has its part of the replicated head and padded columns; the other's words come from the reference."""
    given = given_block(1)
    want = sampled_upstream(given)
    before = torch.cat([given["last_token"][:, None], want[:, :-1]], 1)
    bias = (given["embed"][before].float() @ given["head"].float().t()).bfloat16()
    other = slice((1 - rank) * VOCAB // 2, (2 - rank) * VOCAB // 2)
    scores = (given["base_logits"] + bias).float()[..., other]
    words = iter([best_word(scores[:, step], other.start) for step in range(STEPS)])
    monkeypatch.setattr(spec_decode, "gather_words", lambda own: torch.stack([own, next(words)]))
    hidden, speculator = speculator_of(given, rank, ranks=2, padding=16)
    assert spec_decode.sample_sequential(speculator, 4, hidden)
    assert torch.equal(speculator.draft_tokens[:4], want)
    assert next(words, None) is None


def test_block_with_noise_records_the_logits_on_every_rank():
    """As upstream's does, which its own kernel test compares: here that two ranks do what one does."""
    whole, split = given_block(2, drafts=True), given_block(2, drafts=True)
    for given, ranks in ((whole, 1), (split, 2)):
        given["temperature"].fill_(1.5)
        hidden, speculator = speculator_of(given, ranks - 1, ranks)
        assert spec_decode.sample_sequential(speculator, 4, hidden)
        given["tokens"] = speculator.draft_tokens
    assert torch.equal(whole["tokens"], split["tokens"])
    assert whole["draft_logits"].any() and torch.equal(whole["draft_logits"], split["draft_logits"])
    greedy = given_block(2) | {"draft_logits": None}
    assert not torch.equal(whole["tokens"][:4], sampled_upstream(greedy))


@pytest.mark.parametrize("change, drafts", [
    ({"draft_watermarker": object()}, False),
    ({"use_confidence_head": True}, False),
    ({"acceptance_estimator": object()}, False),
    ({"use_fp64_gumbel": True}, True),
    ({"draft_logits": torch.zeros(7, STEPS, VOCAB)}, True),
])
def test_what_the_sampler_does_not_do_is_left_to_upstream(change, drafts):
    hidden, speculator = speculator_of(given_block(3, drafts=drafts))
    vars(speculator).update(change)
    assert not spec_decode.sample_sequential(speculator, 4, hidden)
    assert (speculator.draft_tokens == -7).all()


@pytest.mark.parametrize("name, value", [("soft_cap", 30.0), ("scale", 0.5), ("head_dtype", torch.float32)])
def test_scaled_and_wider_logits_are_left_to_upstream(name, value):
    hidden, speculator = speculator_of(given_block(3))
    setattr(speculator.model.logits_processor, name, value)
    assert not spec_decode.sample_sequential(speculator, 4, hidden)


def test_fp64_noise_does_not_matter_to_greedy_drafts():
    hidden, speculator = speculator_of(given_block(3))
    speculator.use_fp64_gumbel = True
    assert spec_decode.sample_sequential(speculator, 4, hidden)


def test_upstreams_loop_can_be_asked_for(monkeypatch):
    hidden, speculator = speculator_of(given_block(4))
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", "markov_sampler=upstream")
    assert not spec_decode.sample_sequential(speculator, 4, hidden)
    config = SimpleNamespace(speculative_config=SimpleNamespace(use_dspark=lambda: True))
    assert DRAFT_KERNELS.get_warmup_keys(config) == []
    monkeypatch.setenv("VLLM_AMPERE_KERNELS", "markov_sampler=reference")
    assert spec_decode.sample_sequential(speculator, 4, hidden)


def test_other_processors_keep_upstreams_loop(monkeypatch):
    hidden, speculator = speculator_of(given_block(5))
    monkeypatch.setattr(gate, "architecture", lambda: None)
    assert not spec_decode.sample_sequential(speculator, 4, hidden)


def test_the_draft_class_offers_the_hook(monkeypatch):
    """Patch 0540: the speculator finds it by name on the class that the registry names."""
    from vllm.models.deepseek_v41.nvidia.dspark import DSparkDeepseekV4ForCausalLM

    monkeypatch.setattr(spec_decode, "sample_sequential", lambda *given: given)
    assert DSparkDeepseekV4ForCausalLM.sample_sequential(None, "speculator", 3, "hidden") == ("speculator", 3, "hidden")


def test_drafts_are_tokens_of_the_target():
    """The draft has the whole vocabulary: there is no map of its tokens, whose bounds dummy ids could pass."""
    from vllm.models.deepseek_v41.nvidia.dspark import DSparkDeepseekV4ForCausalLM

    ids = torch.tensor([0, 129_279, 2**31 - 1, -1])
    assert DSparkDeepseekV4ForCausalLM.draft_id_to_target_id is None
    assert torch.equal(DSparkDeepseekV4ForCausalLM.map_draft_to_target(None, ids), ids)
