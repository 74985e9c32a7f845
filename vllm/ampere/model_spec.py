# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's dimensions and layer map, read from config.json and checked (model_spec sections 1 and 2).

`ModelSpec()` is the released V4.1-Flash; `ModelSpec.from_config` reads a checkpoint's own numbers.
Fields carry the names of `text_config`, so that the two read side by side. Standard library only.
"""

import itertools
import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Mapping

from .cache_layout import ENGRAM_DIM, HEAD_DIM, INDEX_DIM, ROPE_DIM
from .errors import CheckpointError

ARCHITECTURE = "DeepseekV41ForCausalLM"

# What kernels and cache layouts are built for; another value is another model.
STREAMS = 4
RATIOS = (0, 1, 2)
_FIXED_TEXT = {
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "index_head_dim": INDEX_DIM,
    "hc_mult": STREAMS,
    "engram_head_dim": ENGRAM_DIM,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_FIXED_QUANTIZATION = {
    "quant_method": "fp8",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_HINT = "check that the folder holds an unmodified DeepSeek-V4.1 checkpoint"


@dataclass(frozen=True)
class Layer:
    """One backbone layer's place in the map.

    Attributes:
        index: layer number.
        ratio: tokens per compressed row; 0 is sliding window only.
        kv_source: layer whose compressed rows it reads (itself included); None at ratio 0.
        index_source: layer whose selection of those rows it follows (itself included); None at ratio 0.
        candidates: "source" publishes the candidate blocks, "masked" selects inside them, "" neither.
        engram: number of its engram table, or None.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidates: str
    engram: int | None

    @property
    def owns_kv(self) -> bool:
        """It compresses: it has a compressor and writes index keys."""
        return self.kv_source == self.index

    @property
    def owns_index(self) -> bool:
        """It selects: it has an index query and head weights."""
        return self.index_source == self.index


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions of a DeepSeek-V4.1; the defaults are the released Flash model's.

    Lengths are tokens, `*_layer_ids` are layer numbers. `engram_layer_ids` may be empty,
    `candidate_source_layer_id` is -1 where no candidates are kept, `num_nextn_predict_layers` counts the
    DSpark stages and may be 0. The rope_* fields are the YaRN numbers of `rope_scaling`, for layers of ratio > 0.

    Raises:
        CheckpointError: the numbers contradict each other.
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    max_position_embeddings: int = 1048576
    rms_norm_eps: float = 1e-20

    num_attention_heads: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    sliding_window: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_max_position_embeddings: int = 65536

    compress_ratios: tuple[int, ...] = (0,) * 2 + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8

    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0

    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_vocab_size: int = 16000000
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092

    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3

    image_token_id: int = 129264
    vision_layers: int = 32

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read a config.json nested as released (`text_config`, `vision_config`, `quantization_config`).

        Raises:
            CheckpointError: another model, a missing or unusable key, or numbers that contradict each other.
        """
        named = config.get("architectures") or ["no architecture"]
        if ARCHITECTURE not in named:
            raise CheckpointError(
                f"config.json is for {', '.join(map(str, named))}, not {ARCHITECTURE}",
                "this build serves DeepSeek-V4.1 only; plain vLLM serves other models",
            )
        text, vision = _section(config, "text_config"), _section(config, "vision_config")
        rope = _section(text, "rope_scaling", "text_config.")
        _expect(text, _FIXED_TEXT, "text_config")
        _expect(rope, {"rope_type": "yarn"}, "text_config.rope_scaling")
        _expect(_section(config, "quantization_config"), _FIXED_QUANTIZATION, "quantization_config")
        sections = {"": config, "text_config.": text, "text_config.rope_scaling.": rope, "vision_config.": vision}
        values = {}
        for field in fields(cls):
            where, key = _place(field.name)
            if key not in sections[where]:
                raise CheckpointError(f"config.json lacks {where}{key}", _HINT)
            values[field.name] = _typed(sections[where][key], field.type, where + key)
        return cls(**values)

    def to_config(self) -> dict[str, Any]:
        """A config.json nested as released that `from_config` reads back to an equal spec."""
        text = {"model_type": "deepseek_v41_text", **_FIXED_TEXT}
        rope, vision = {"rope_type": "yarn"}, {"model_type": "deepseek_v41_vision"}
        config = {
            "architectures": [ARCHITECTURE], "model_type": "deepseek_v41", "dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
            "quantization_config": {**_FIXED_QUANTIZATION, "activation_scheme": "dynamic"},
            "text_config": text, "vision_config": vision,
        }
        sections = {"": config, "text_config.": text, "text_config.rope_scaling.": rope, "vision_config.": vision}
        for field in fields(self):
            where, key = _place(field.name)
            value = getattr(self, field.name)
            sections[where][key] = list(value) if isinstance(value, tuple) else value
        text["rope_scaling"] = rope
        return config

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("num_nextn_predict_layers", "vision_layers", "engram_pad_token_id",
                                         "dspark_noise_token_id", "image_token_id")
            if field.name != "candidate_source_layer_id" and isinstance(value, (int, float)):
                _require(value >= 0 if may_be_zero else value > 0, f"{field.name} is {value}, must be positive")
        _require(self.num_attention_heads % self.o_groups == 0,
                 f"num_attention_heads {self.num_attention_heads} is not a multiple of o_groups {self.o_groups}")
        _require(self.num_experts_per_tok <= self.n_routed_experts
                 and self.dspark_num_experts_per_tok <= self.dspark_n_routed_experts,
                 "more experts are used per token than there are")
        self._check_sources()
        self._check_engram()
        if self.num_nextn_predict_layers:
            _ascending("dspark_target_layer_ids", self.dspark_target_layer_ids, self.num_hidden_layers)
            _require(bool(self.dspark_target_layer_ids), "dspark_target_layer_ids is empty, but there are draft layers")
            noise, vocab = self.dspark_noise_token_id, self.vocab_size
            _require(noise < vocab, f"dspark_noise_token_id {noise} is outside the vocabulary of {vocab}")

    def _check_sources(self) -> None:
        ratios, backbone = self.compress_ratios, self.num_hidden_layers
        _require(len(ratios) == backbone + self.num_nextn_predict_layers,
                 f"compress_ratios has {len(ratios)} entries, must have {backbone} + {self.num_nextn_predict_layers} "
                 "(layers + draft layers)")
        _require(set(ratios) <= set(RATIOS), f"compress_ratios holds {sorted(set(ratios) - set(RATIOS))}, "
                                             "must hold 0, 1 and 2 only")
        _require(not any(ratios[backbone:]), "compress_ratios of the draft layers must be 0")
        _ascending("kv_source_layer_ids", self.kv_source_layer_ids, backbone)
        _ascending("index_source_layer_ids", self.index_source_layer_ids, backbone)
        missing = set(self.kv_source_layer_ids) - set(self.index_source_layer_ids)
        _require(not missing, f"KV source layers {sorted(missing)} are not in index_source_layer_ids")
        for layer in self.layers:
            if layer.ratio == 0:
                _require(layer.index not in self.index_source_layer_ids,
                         f"layer {layer.index} has compress ratio 0 and cannot be a KV or index source")
                continue
            _require(layer.kv_source is not None, f"compressed layer {layer.index} has no KV source at or before it")
            source = ratios[layer.kv_source]
            _require(source == layer.ratio, f"layer {layer.index} has compress ratio {layer.ratio}, "
                                            f"its KV source {layer.kv_source} has {source}")
        candidate = self.candidate_source_layer_id
        _require(candidate == -1 or candidate in self.index_source_layer_ids,
                 f"candidate_source_layer_id {candidate} is not in index_source_layer_ids")
        for layer in self.layers:
            _require(layer.candidates != "masked" or layer.kv_source == self.layers[candidate].kv_source,
                     f"layer {layer.index} selects among candidates of layer {candidate}, but reads other rows")

    def _check_engram(self) -> None:
        _ascending("engram_layer_ids", self.engram_layer_ids, self.num_hidden_layers)
        have, rows = len(self.engram_layer_ids), self.engram_num_embeddings
        _require(len(rows) == have, f"engram_num_embeddings has {len(rows)} entries for {have} engram layers")
        for layer, size, primes in zip(self.engram_layer_ids, rows, self.engram_primes):
            needed = sum(map(sum, primes))
            _require(size >= needed, f"engram table of layer {layer} has {size} rows, its hash needs {needed}")

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The backbone, in order."""
        def source(ids, index):
            return max((i for i in ids if i <= index), default=None)

        def candidates(index, ratio):
            first = self.candidate_source_layer_id
            if index == first:
                return "source"
            return "masked" if ratio and 0 <= first < index and index in self.index_source_layer_ids else ""

        return tuple(
            Layer(
                index,
                ratio,
                source(self.kv_source_layer_ids, index) if ratio else None,
                source(self.index_source_layer_ids, index) if ratio else None,
                candidates(index, ratio),
                self.engram_layer_ids.index(index) if index in self.engram_layer_ids else None,
            )
            for index, ratio in enumerate(self.compress_ratios[: self.num_hidden_layers])
        )

    @cached_property
    def engram_primes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Rows of every hash column: [engram layer][n-gram order 2, 3, ...][head].

        Each order starts its search at `engram_vocab_size`; no prime serves twice in the whole model.
        """
        orders = self.engram_max_ngram_size - 1
        return engram_primes(len(self.engram_layer_ids), orders, self.engram_n_heads, self.engram_vocab_size)

    @property
    def has_image_bias(self) -> bool:
        """Routers carry `bias_vl` exactly where there is a vision tower."""
        return self.vision_layers > 0


def _place(field: str) -> tuple[str, str]:
    """Section and key of a field in config.json."""
    if field == "image_token_id":
        return "", field
    if field == "vision_layers":
        return "vision_config.", "num_hidden_layers"
    if field.startswith("rope_") and field != "rope_theta":
        return "text_config.rope_scaling.", field.removeprefix("rope_")
    return "text_config.", field


def engram_primes(layers: int, orders: int, heads: int, vocab_size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The least primes from `vocab_size` up, dealt out in order: [layer][n-gram order][head]."""
    primes = (n for n in itertools.count(max(vocab_size, 2)) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return tuple(tuple(tuple(itertools.islice(primes, heads)) for _ in range(orders)) for _ in range(layers))


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckpointError(message, _HINT)


def _ascending(name: str, ids: tuple[int, ...], bound: int) -> None:
    _require(all(a < b for a, b in zip(ids, ids[1:])), f"{name} {list(ids)} is not strictly ascending")
    _require(all(0 <= i < bound for i in ids), f"{name} {list(ids)} names a layer outside 0..{bound - 1}")


def _section(config: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    if not isinstance(config.get(key), Mapping):
        raise CheckpointError(f"config.json has no section {where}{key}", _HINT)
    return config[key]


def _expect(section: Mapping[str, Any], fixed: Mapping[str, Any], where: str) -> None:
    for key, value in fixed.items():
        found = section.get(key)
        if found != value:
            raise CheckpointError(f"{where}.{key} is {found!r}, must be {value!r}", _HINT)


def _typed(value: Any, kind: type, name: str) -> Any:
    def is_int(v):
        return isinstance(v, int) and not isinstance(v, bool)

    if kind is int and is_int(value):
        return value
    if kind is float and (is_int(value) or isinstance(value, float)):
        return float(value)
    if kind == tuple[int, ...] and isinstance(value, (list, tuple)) and all(map(is_int, value)):
        return tuple(value)
    wanted = {int: "an integer", float: "a number"}.get(kind, "a list of integers")
    raise CheckpointError(f"config.json: {name} is {value!r}, must be {wanted}", _HINT)
