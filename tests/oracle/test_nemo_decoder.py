# SPDX-License-Identifier: Apache-2.0
"""The reference decoder against nemo_automodel's DeepSeek-V4.1, a model written by other hands.

Both run in float32 on random tiny models. The released caches round to 4 and 8 bits, so a difference of one
float32 bit may flip a code and grow into whole units of logits. Two comparisons therefore: with the cache
rounding taken out of both sides, and with it in, where the decoder checks its own rounding against the
oracle's and then goes on from the oracle's, so that a flipped tie stays one flipped tie.
"""

import warnings
from dataclasses import replace

import pytest
import torch

nemo_attention = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.attention",
                                     reason="nemo_automodel lives in .venv-oracle only")
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41 import dspark as nemo_dspark
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from nemo_automodel.components.models.deepseek_v41.quantization import quantize_cache
from nemo_automodel.components.models.deepseek_v41.state_dict_adapter import DeepseekV41DSparkStateDictAdapter
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.testing.reference_decoder import ReferenceDecoder
from vllm.ampere.testing.reference_dspark import ReferenceDrafter
from vllm.ampere.testing.reference_rounding import FLOAT32, RELEASED, Rounding, q4m, q4n, q8
from vllm.ampere.testing.reference_weights import random_weights

pytestmark = pytest.mark.oracle

BACKEND = BackendConfig(attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch")
VOCAB, TOKENS, SEEDS = 256, 61, (0, 1, 2, 3)
BOUND = 1e-4
# Every ratio, two KV sources, three index sources, the last one under a candidate mask, engrams on a layer
# without and with compression; window, selection and candidates all smaller than the sequence.
SPEC = ModelSpec(
    vocab_size=VOCAB, hidden_size=128, num_hidden_layers=8, num_attention_heads=8, q_lora_rank=64, o_lora_rank=32,
    o_groups=2, sliding_window=16, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0), kv_source_layer_ids=(2, 4),
    index_source_layer_ids=(2, 4, 6), index_n_heads=16, index_topk=8, candidate_source_layer_id=4,
    candidate_topk_blocks=4, candidate_block_size=4, moe_intermediate_size=64, n_routed_experts=16,
    engram_layer_ids=(1, 3), engram_num_embeddings=(28000, 31000), engram_vocab_size=1000,
    engram_compressed_vocab_size=192, dspark_noise_token_id=250, dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=16, dspark_n_routed_experts=8, vision_layers=1,
)


@pytest.fixture(scope="module")
def tokenizer():
    """A word-level tokenizer: 64 words stand twice, lower and upper case, so that classes merge."""
    words = [f"w{i}" for i in range(VOCAB - 64)] + [f"W{i}" for i in range(64)]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


TOKEN_CLASSES = [*range(VOCAB - 64), *range(64)]


def nested(spec):
    config = spec.to_config()
    config["text_config"]["dtype"] = "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DeepseekV41Config(text_config=config["text_config"], vision_config={"num_hidden_layers": 0}, dtype="float32")


@pytest.fixture(scope="module")
def nemo(tokenizer):
    """Make the oracle's model with given weights."""
    model = DeepseekV41ForCausalLM(nested(SPEC), backend=BACKEND, tokenizer=tokenizer)

    def load(weights):
        state = model.state_dict_adapter.from_hf({k: v.clone() for k, v in weights.items()})
        model.load_state_dict({k: v.float() for k, v in state.items()})
        return model

    return load


def tokens_of(seed):
    return torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1000 + seed))


@torch.no_grad()
def nemo_logits(model, tokens, image=None):
    hidden, _ = model.model(tokens[None], image_mask=None if image is None else image[None])
    return model.lm_head(hidden)[0]


def assert_same(got, want):
    assert 3 < want.abs().max() < 12, f"logits of magnitude {want.abs().max():.1f} test little"
    assert (got - want).abs().max() <= BOUND, f"max |diff| {(got - want).abs().max():.2e}"
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.fixture
def exact_caches(monkeypatch):
    """Take the cache rounding out of the oracle."""
    for module in (nemo_attention, nemo_dspark):
        monkeypatch.setattr(module, "quantize_cache", lambda x, *, format, block_size: x)


@pytest.fixture
def followed(monkeypatch):
    """A released `Rounding` that checks each call against the oracle's same call and returns the oracle's result."""
    calls = {"fp8": [], "nvfp4": [], "mxfp4": []}

    def spy(x, *, format, block_size):
        result = quantize_cache(x, format=format, block_size=block_size)
        calls[format].append((x[0], result[0]))
        return result

    def follow(format, ours):
        def rounding(x):
            given, result = calls[format].pop(0)
            assert x.shape == given.shape
            assert (x - given).abs().max() <= 1e-4
            assert (ours(x) != result).float().mean() <= 1e-3
            assert torch.equal(ours(given), result)
            return result
        return rounding

    for module in (nemo_attention, nemo_dspark):
        monkeypatch.setattr(module, "quantize_cache", spy)
    yield Rounding(window=follow("fp8", RELEASED.window), compressed=follow("nvfp4", RELEASED.compressed),
                   index=follow("mxfp4", RELEASED.index))
    assert not any(calls.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_caches(nemo, exact_caches, seed):
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    got = ReferenceDecoder(SPEC, weights, TOKEN_CLASSES, FLOAT32).logits(tokens)
    assert_same(got, nemo_logits(nemo(weights), tokens))


@pytest.mark.parametrize("seed", SEEDS)
def test_released_caches(nemo, followed, seed):
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    want = nemo_logits(nemo(weights), tokens)
    spec = replace(SPEC, num_nextn_predict_layers=0, compress_ratios=SPEC.compress_ratios[:8])
    assert_same(ReferenceDecoder(spec, weights, TOKEN_CLASSES, followed).logits(tokens), want)
