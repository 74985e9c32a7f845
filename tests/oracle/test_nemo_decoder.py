# SPDX-License-Identifier: Apache-2.0
"""The reference decoder against nemo_automodel's DeepSeek-V4.1, a model written by other hands.

Both run in float32 on random tiny models. The released caches round to 4 and 8 bits, so a difference of one
float32 bit may flip a code and grow into whole units of logits. Two comparisons therefore: with the cache
rounding taken out of both sides, and with it in, where the decoder checks its own rounding against the
oracle's and then goes on from the oracle's, so that a flipped tie stays one flipped tie.
"""

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
from nemo_automodel.components.models.deepseek_v41.state_dict_adapter import (
    DeepseekV41DSparkStateDictAdapter,
    dequantize_checkpoint_weight,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.testing.reference_controls import CONTROLS
from vllm.ampere.testing.reference_decoder import ReferenceDecoder
from vllm.ampere.testing.reference_dspark import ReferenceDrafter
from vllm.ampere.testing.reference_rounding import FLOAT32, RELEASED, Rounding, q4m, q4n, q8
from vllm.ampere.testing.reference_weights import decode, random_weights

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")]

BACKEND = BackendConfig(attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch")
VOCAB, TOKENS, SEEDS = 256, 61, (0, 1, 2, 3)
BOUND = 1e-4
IMAGE = torch.zeros(TOKENS, dtype=torch.bool)
IMAGE[20:27] = IMAGE[40:42] = True
# Every ratio, two KV sources, three index sources, the last one under a candidate mask, engrams on a layer
# without and with compression; window, selection and candidates all smaller than the sequence.
SPEC = ModelSpec(
    vocab_size=VOCAB, hidden_size=128, num_hidden_layers=8, num_attention_heads=8, q_lora_rank=64, o_lora_rank=32,
    o_groups=2, sliding_window=16, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0), kv_source_layer_ids=(2, 4),
    index_source_layer_ids=(2, 4, 6), index_n_heads=16, index_topk=8, candidate_source_layer_id=4,
    candidate_topk_blocks=4, candidate_block_size=4, moe_intermediate_size=64, n_routed_experts=16,
    swiglu_limit=0.75, engram_layer_ids=(1, 3), engram_num_embeddings=(28000, 31000), engram_vocab_size=1000,
    engram_compressed_vocab_size=192, dspark_noise_token_id=250, dspark_target_layer_ids=(5, 6, 7),
    dspark_markov_rank=16, dspark_n_routed_experts=8, vision_layers=1,
)
BACKBONE = replace(SPEC, num_nextn_predict_layers=0, compress_ratios=SPEC.compress_ratios[: SPEC.num_hidden_layers])


@pytest.fixture(scope="module")
def tokenizer():
    """A word-level tokenizer: 64 words stand twice, lower and upper case, so that classes merge."""
    words = [f"w{i}" for i in range(VOCAB - 64)] + [f"W{i}" for i in range(64)]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


TOKEN_CLASSES = [*range(VOCAB - 64), *range(64)]


def oracle_config(spec):
    config = spec.to_config()
    config["text_config"]["dtype"] = "float32"
    return DeepseekV41Config(text_config=config["text_config"], vision_config={"num_hidden_layers": 0}, dtype="float32")


@pytest.fixture(scope="module")
def nemo(tokenizer):
    """Make the oracle's model with the random weights of a seed."""
    model = DeepseekV41ForCausalLM(oracle_config(SPEC), backend=BACKEND, tokenizer=tokenizer)
    loaded = None

    def load(seed):
        nonlocal loaded
        if seed != loaded:
            state = model.state_dict_adapter.from_hf(dict(random_weights(SPEC, seed)))
            model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
            loaded = seed
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
    """A released `Rounding` that finds the oracle's call with the same input, checks its own result against the
    oracle's, and goes on with the oracle's."""
    calls = {"fp8": [], "nvfp4": [], "mxfp4": []}

    def spy(x, *, format, block_size):
        result = quantize_cache(x, format=format, block_size=block_size)
        calls[format].append((x[0], result[0]))
        return result

    def follow(format, ours):
        def rounding(x):
            same = [i for i, (given, _) in enumerate(calls[format])
                    if given.shape == x.shape and (given - x).abs().max() <= BOUND]
            assert same, f"the oracle never rounded this tensor to {format}"
            given, result = calls[format].pop(same[0])
            assert torch.equal(ours(given), result)
            return result
        return rounding

    for module in (nemo_attention, nemo_dspark):
        monkeypatch.setattr(module, "quantize_cache", spy)
    yield Rounding(window=follow("fp8", RELEASED.window), compressed=follow("nvfp4", RELEASED.compressed),
                   index=follow("mxfp4", RELEASED.index))
    assert not any(calls.values()), "the oracle rounded more tensors"


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_with_exact_caches(nemo, exact_caches, seed):
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    got = ReferenceDecoder(SPEC, weights, TOKEN_CLASSES, FLOAT32).logits(tokens)
    assert_same(got, nemo_logits(nemo(seed), tokens))


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_with_released_caches(nemo, followed, seed):
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    want = nemo_logits(nemo(seed), tokens)
    assert_same(ReferenceDecoder(BACKBONE, weights, TOKEN_CLASSES, followed).logits(tokens), want)


@pytest.mark.parametrize("seed", SEEDS)
def test_image_spans(nemo, exact_caches, seed):
    """Routing by `bias_vl`, dead tokens of the engram, look-back cut at the spans."""
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    want = nemo_logits(nemo(seed), tokens, IMAGE)
    assert_same(ReferenceDecoder(SPEC, weights, TOKEN_CLASSES).logits(tokens, IMAGE), want)


@pytest.mark.parametrize("control", sorted(CONTROLS.keys() - {"no_cache_rounding"}))
def test_a_broken_rule_shows(nemo, exact_caches, control):
    """Each broken decoder is 100 bounds away: the comparisons above see that rule."""
    seed = 0
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    got = CONTROLS[control](SPEC, weights, TOKEN_CLASSES).logits(tokens, IMAGE)
    assert (got - nemo_logits(nemo(seed), tokens, IMAGE)).abs().max() > 100 * BOUND


def test_missing_cache_rounding_shows(nemo):
    seed = 0
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    got = CONTROLS["no_cache_rounding"](SPEC, weights, TOKEN_CLASSES, RELEASED).logits(tokens)
    assert (got - nemo_logits(nemo(seed), tokens)).abs().max() > 100 * BOUND


class ConfidenceAfterNorm(ReferenceDrafter):
    """The oracle's own training convention; the released head reads the state before the norm."""

    def judged(self, hidden, normed):
        return normed


@torch.no_grad()
def nemo_draft(model, weights, tokens, block):
    """Taps, hidden states and heads of the oracle, for a block whose tokens are given.

    Args:
        block: int64 [6], the newest token and the five guesses after it.

    Returns:
        Final-normed states [5, D], logits [5, V], confidence logits [5].
    """
    text = model.config.text_config
    backbone = nemo_dspark.DeepseekV41DSparkBackbone(text, BACKEND)
    adapter = DeepseekV41DSparkStateDictAdapter(text, backbone.moe_config, BACKEND, dtype=torch.float32)
    state = adapter.from_hf({name: tensor for name, tensor in weights.items() if name.startswith("mtp.")})
    backbone.load_state_dict(state)
    _, streams = model.model(tokens[None], output_hidden_states=True)
    taps = torch.cat([streams[i].mean(2) for i in SPEC.dspark_target_layer_ids], -1)
    anchor, length = torch.tensor([[len(tokens)]]), len(tokens)
    inputs = torch.tensor([int(block[0])] + [SPEC.dspark_noise_token_id] * (SPEC.dspark_block_size - 1))
    out = backbone(
        model.model.embed_tokens(inputs)[None], taps,
        position_ids=backbone.build_position_ids(anchor, length),
        attention_mask=backbone.build_attention_mask(anchor, torch.ones(1, 1, dtype=torch.bool), length, torch.float32),
        previous_token_ids=block[None, :-1],
    )
    normed = out.normalized_hidden_states[0]
    return normed, model.lm_head(normed) + out.transition_logits[0], out.confidence_pred[0]


def reference_draft(weights, tokens, rounding):
    """The draft after the last token, which the context does not hold."""
    decoder = ReferenceDecoder(SPEC, weights, TOKEN_CLASSES, rounding)
    state = decoder.start()
    decoder.step(state, tokens[:-1])
    return ConfidenceAfterNorm(decoder).draft(state, int(tokens[-1]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("length", (9, TOKENS))
def test_draft_with_exact_caches(nemo, exact_caches, seed, length):
    """A context shorter and one longer than the window; the oracle is given our guesses, one by one."""
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)[:length]
    got = reference_draft(weights, tokens, FLOAT32)
    block = torch.cat([tokens[-1:], got.tokens])
    normed, logits, confidence = nemo_draft(nemo(seed), weights, tokens[:-1], block)
    assert_same(got.logits, logits)
    assert torch.equal(got.tokens, logits.argmax(-1))
    assert (got.normed - normed).abs().max() <= BOUND
    assert (got.confidence - confidence).abs().max() <= BOUND


@pytest.mark.parametrize("seed", SEEDS)
def test_draft_with_released_caches(nemo, followed, seed):
    weights, tokens = random_weights(SPEC, seed), tokens_of(seed)
    guesses = torch.zeros(SPEC.dspark_block_size, dtype=torch.int64)
    normed, _, _ = nemo_draft(nemo(seed), weights, tokens[:-1], torch.cat([tokens[-1:], guesses]))
    assert (reference_draft(weights, tokens, followed).normed - normed).abs().max() <= BOUND


@pytest.mark.parametrize("format, size, ours", [
    ("fp8", 32, lambda x: q8(x, 32)), ("mxfp4", 32, q4m), ("nvfp4", 16, q4n),
])
def test_cache_formats_are_equal_bits(format, size, ours):
    """Magnitudes from below every floor to above every clamp, and every tie of both code tables."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-40, 20, (4096, 1), generator=generator)
    spread = torch.randn(4096, 512, generator=generator) * torch.exp2(exponents)
    steps = torch.arange(-14, 15) * 0.25 * 2.0 ** torch.arange(-20, 20)[:, None]
    ties = torch.cat([steps, steps[:, :3]], 1)
    for x in (spread, ties, torch.zeros(2, 64)):
        assert torch.equal(ours(x), quantize_cache(x, format=format, block_size=size))


def test_weight_formats_are_equal_bits():
    """Every byte of both weight formats, under every finite scale byte (FP4) and one in eight (FP8)."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 2)
    fp8, tiles = codes.view(torch.float8_e4m3fn), (torch.arange(32) * 8).byte().view(2, 16).view(torch.float8_e8m0fnu)
    assert_equal_or_nan(decode(fp8, tiles), dequantize_checkpoint_weight(fp8, tiles, dtype=torch.float32))
    fp4 = codes.view(torch.int8)
    for first in range(0, 256, 32):
        rows = torch.arange(first, first + 32).clamp(max=254).byte().repeat(64, 1).view(torch.float8_e8m0fnu)
        assert_equal_or_nan(decode(fp4, rows), dequantize_checkpoint_weight(fp4, rows, dtype=torch.float32))


def assert_equal_or_nan(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
