# SPDX-License-Identifier: Apache-2.0
import copy
from dataclasses import replace

import pytest

from vllm.ampere.errors import CheckpointError
from vllm.ampere.model_spec import ModelSpec

RELEASED = ModelSpec()


def test_layer_map_of_the_released_model():
    """The table of model_spec section 2, row by row."""
    def rows(*ids):
        return [(l.ratio, l.kv_source, l.index_source, l.candidates) for l in map(RELEASED.layers.__getitem__, ids)]

    assert rows(0, 1) == [(0, None, None, "")] * 2
    for source, readers in ((2, range(3, 8)), (8, range(9, 14)), (14, range(15, 20))):
        assert rows(source, *readers) == [(2, source, source, "")] * (1 + len(readers))
    assert rows(20) == [(1, 20, 20, "source")]
    assert rows(21, 22, 23) == [(1, 20, 20, "")] * 3
    for source in (24, 28, 32, 36):
        assert rows(source) == [(1, 20, source, "masked")]
        assert rows(*range(source + 1, source + 4)) == [(1, 20, source, "")] * 3
    assert [l.index for l in RELEASED.layers if l.owns_kv] == [2, 8, 14, 20]
    assert [l.index for l in RELEASED.layers if l.owns_index] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert {l.index: l.engram for l in RELEASED.layers if l.engram is not None} == {1: 0, 14: 1}


def test_engram_primes_of_the_released_model():
    """Published first and last primes, and the two row counts that config.json states."""
    first, second = RELEASED.engram_primes
    assert first[0][:3] == (16000057, 16000079, 16000081) and second[-1][-1] == 16000889
    assert (sum(map(sum, first)), sum(map(sum, second))) == RELEASED.engram_num_embeddings
    flat = [p for layer in RELEASED.engram_primes for order in layer for p in order]
    assert len(flat) == len(set(flat)) == 48


def test_config_reads_back():
    small = replace(RELEASED, hidden_size=256, rope_factor=4.0, vision_layers=0,
                    engram_layer_ids=(), engram_num_embeddings=())
    for spec in (RELEASED, small):
        assert ModelSpec.from_config(spec.to_config()) == spec
    assert RELEASED.has_image_bias and not small.has_image_bias


def test_config_is_nested_as_released():
    config = RELEASED.to_config()
    assert config["text_config"]["rope_scaling"] == {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    }
    assert config["vision_config"]["num_hidden_layers"] == 32 and config["image_token_id"] == 129264


def edited(path, value):
    config = copy.deepcopy(RELEASED.to_config())
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section[name]
    if value is None:
        del section[key]
    else:
        section[key] = value
    return config


@pytest.mark.parametrize("path, value, message", [
    ("architectures", ["LlamaForCausalLM"], "config.json is for LlamaForCausalLM, not DeepseekV41ForCausalLM"),
    ("architectures", ["DeepseekV4ForCausalLM"], "is for DeepseekV4ForCausalLM"),
    ("architectures", None, "is for no architecture"),
    ("text_config", None, "no section text_config"),
    ("text_config.rope_scaling", None, "no section text_config.rope_scaling"),
    ("text_config.hidden_size", None, "lacks text_config.hidden_size"),
    ("text_config.hidden_size", "5120", "text_config.hidden_size is '5120', must be an integer"),
    ("text_config.hidden_size", True, "must be an integer"),
    ("text_config.hidden_size", -1, "hidden_size is -1, must be positive"),
    ("text_config.swiglu_limit", [10], "must be a number"),
    ("text_config.head_dim", 128, "text_config.head_dim is 128, must be 512"),
    ("text_config.hc_mult", 2, "hc_mult is 2, must be 4"),
    ("text_config.rope_scaling.rope_type", "linear", "rope_type is 'linear', must be 'yarn'"),
    ("quantization_config.expert_dtype", "fp8", "expert_dtype is 'fp8', must be 'fp4'"),
    ("text_config.o_groups", 7, "num_attention_heads 64 is not a multiple of o_groups 7"),
    ("text_config.num_experts_per_tok", 500, "more experts are used per token"),
    ("text_config.compress_ratios", [0, 0] + [2] * 18 + [1] * 20, "has 40 entries, must have 40 \\+ 3"),
    ("text_config.compress_ratios", [0, 0] + [4] * 18 + [1] * 20 + [0] * 3, "compress_ratios holds \\[4\\]"),
    ("text_config.compress_ratios", [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 1], "draft layers must be 0"),
    ("text_config.compress_ratios", [0, 2] + [2] * 18 + [1] * 20 + [0] * 3, "layer 1 has no KV source"),
    ("text_config.compress_ratios", [0, 0] + [2] * 19 + [1] * 19 + [0] * 3, "ratio 1, its KV source 20 has 2"),
    ("text_config.compress_ratios", "0", "must be a list of integers"),
    ("text_config.kv_source_layer_ids", [8, 2, 14, 20], "not strictly ascending"),
    ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 40], "outside 0..39"),
    ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 22], "\\[22\\] are not in index_source_layer_ids"),
    ("text_config.index_source_layer_ids", [0, 2, 8, 14, 20], "layer 0 has compress ratio 0"),
    ("text_config.candidate_source_layer_id", 21, "candidate_source_layer_id 21 is not in"),
    ("text_config.candidate_source_layer_id", 2, "layer 8 selects among candidates of layer 2"),
    ("text_config.engram_num_embeddings", [384006168], "has 1 entries for 2 engram layers"),
    ("text_config.engram_num_embeddings", [384006168, 384016681], "384016681 rows, its hash needs 384016682"),
    ("text_config.dspark_target_layer_ids", [37, 38, 40], "outside 0..39"),
    ("text_config.dspark_target_layer_ids", [], "dspark_target_layer_ids is empty"),
    ("text_config.dspark_noise_token_id", 129280, "outside the vocabulary"),
])
def test_a_bad_config_is_one_line_and_a_hint(path, value, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelSpec.from_config(edited(path, value))
    assert "\n" not in str(caught.value) and caught.value.hint
