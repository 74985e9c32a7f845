# SPDX-License-Identifier: Apache-2.0
"""The presets of the tiny checkpoints, and their config.json."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, Mapping

from ..errors import UsageError
from ..model_spec import engram_primes
from .tiny_tokenizer import TINY_NOISE_TOKEN, TINY_VOCAB

# Eight layers with every kind of layer of the release: window only, ratio 2 and 1, KV source, index source
# with and without keys of its own, candidate source, engram; and the three draft stages.
_TEXT = {
    "model_type": "deepseek_v41_text",
    "vocab_size": TINY_VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1] + [0, 0, 0],
    "compress_rope_theta": 160000,
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 64,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 1000,
    "engram_pad_token_id": 2,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": TINY_NOISE_TOKEN,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 64,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 3,
}
_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 64,
    "min_pixels": 7056,
    "max_wh_ratio": None,
}
_DEEPSEEK = {"vocab_size": 129280, "dspark_noise_token_id": 128799}


@dataclass(frozen=True)
class Recipe:
    """What a tiny checkpoint is made of.

    Attributes:
        text: keys of `text_config` that differ from the common ones.
        vision: `vision_config`.
        own_tokenizer: DeepSeek's tokenizer of 129,280 entries in place of the one of 512.
        routing_bias_std: spread of the routing bias. At 5 the selected experts hardly depend on rounding, so
            that two right implementations agree closely; at 0.2 ties flip and logits jump.
        block_gain: what attention, experts and engram add to the residual, relative to 1 / sqrt(inputs).
        drafts_agree: the Markov head predicts what the target would say if the blocks added nothing.
    """

    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=lambda: {**_VISION, "num_hidden_layers": 0})
    own_tokenizer: bool = False
    routing_bias_std: float = 5.0
    block_gain: float = 1.2
    drafts_agree: bool = False


_AGREE = {"block_gain": 0.03, "drafts_agree": True}
PRESETS = {
    # Comparisons of logits: no router ties, and top-k, candidates and window all bite within 700 tokens.
    "sharp": Recipe(),
    # Speculative decoding: most drafts are accepted.
    "parrot": Recipe({"dspark_markov_rank": 256}, **_AGREE),
    # The released top-k, and sizes that GPU kernels take at tensor parallel 1 and 2 without padding.
    "wide_topk": Recipe({
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "moe_intermediate_size": 256,
        "index_n_heads": 32,
        "index_topk": 512,
        "candidate_topk_blocks": 128,
        "engram_vocab_size": 300,
    }),
    # The demo: chat with DeepSeek's tokenizer.
    "demo": Recipe({**_DEEPSEEK, "dspark_markov_rank": 256}, own_tokenizer=True, **_AGREE),
    # Image input: a vision tower, and routing biases of its own for image tokens.
    "vision": Recipe(_DEEPSEEK, _VISION, own_tokenizer=True),
}


def resolve(preset: str, overrides: Mapping[str, Any]) -> Recipe:
    """The recipe of a preset, with keys of `text_config` or attributes of `Recipe` overridden.

    Raises:
        UsageError: no such preset, or no such key.
    """
    if preset not in PRESETS:
        raise UsageError(f"no tiny checkpoint is called {preset!r}", f"choose one of {', '.join(PRESETS)}")
    recipe = PRESETS[preset]
    attributes = {f.name for f in fields(Recipe)} - {"text"}
    unknown = sorted(set(overrides) - attributes - set(_TEXT))
    if unknown:
        raise UsageError(f"a tiny checkpoint has no setting {unknown[0]!r}", "use a key of text_config")
    text = {key: value for key, value in overrides.items() if key in _TEXT}
    others = {key: value for key, value in overrides.items() if key in attributes}
    return replace(recipe, text={**recipe.text, **text}, **others)


def build_config(recipe: Recipe, classes: int) -> dict:
    """config.json, nested as released.

    Args:
        recipe: what the checkpoint is made of.
        classes: the tokenizer's number of normalised classes.
    """
    text = {**_TEXT, **recipe.text, "engram_compressed_vocab_size": classes}
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 129264,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "vision_config": dict(recipe.vision),
        "text_config": text,
    }
    layers, orders = len(text["engram_layer_ids"]), text["engram_max_ngram_size"] - 1
    primes = engram_primes(layers, orders, text["engram_n_heads"], text["engram_vocab_size"])
    text["engram_num_embeddings"] = [sum(map(sum, layer)) for layer in primes]
    return config
