# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a V4.1 checkpoint: name, dtype, shape and shard, derived from its config.json.

Names are those of the release: bare (no `model.` prefix), dense weights in E4M3 with one UE8M0 byte a
32x32 tile, routed experts in packed E2M1 (two codes a byte) with one UE8M0 byte a row and 32 inputs.
Source: model_spec sections 7, 8 and 11. Imports neither torch nor vLLM.
"""

import math
from typing import Any, Iterator, Mapping, NamedTuple

from .cache_layout import ENGRAM_DIM, ENGRAM_SCALES, HEAD_DIM, INDEX_DIM
from .model_spec import STREAMS, Layer, ModelSpec

# Bytes an element, by the dtype names of the safetensors format.
DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
TILE = 32


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        name: its name in the checkpoint.
        dtype: a key of `DTYPE_BYTES`.
        shape: stored shape; the last dimension of an I8 tensor counts bytes, of two codes each.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


def expected_tensors(config: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """The tensors that a checkpoint with this config.json holds, in the order of the release's shards.

    Args:
        config: config.json as a dict, nested as released (`text_config`, `vision_config`).

    Raises:
        CheckpointError: it is not the config.json of a V4.1.
    """
    spec = ModelSpec.from_config(config)
    if spec.has_image_bias:
        yield from _vision(config["vision_config"], spec.hidden_size)
    yield from text_tensors(spec)


def text_tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    """The tensors of the text model and its draft, in the order of the release's shards."""
    yield TensorSpec("embed.weight", "BF16", (spec.vocab_size, spec.hidden_size))
    for layer in spec.layers:
        yield from _block(f"layers.{layer.index}.", spec, spec.n_routed_experts)
        yield from _sources(f"layers.{layer.index}.attn.", spec, layer)
    yield TensorSpec("head.weight", "BF16", (spec.vocab_size, spec.hidden_size))
    yield TensorSpec("norm.weight", "BF16", (spec.hidden_size,))
    yield from _draft(spec)
    for index, rows in zip(spec.engram_layer_ids, spec.engram_num_embeddings):
        yield from _engram(f"layers.{index}.engram.", spec, rows)


def shard_key(name: str) -> tuple[int, int]:
    """Sorts tensors into the release's shards: vision, embed, one a layer, head, one a stage, one an engram.

    Tensors with equal keys share a shard; shards are numbered in the order of their keys.
    """
    words = name.split(".")
    if words[0] == "layers":
        return (5 if words[2] == "engram" else 2, int(words[1]))
    if words[0] == "mtp":
        return (4, int(words[1]))
    return ({"embed": 1, "head": 3, "norm": 3}.get(words[0], 0), 0)


def _fp8(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (out, inner))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (-(-out // TILE), -(-inner // TILE)))


def _fp4(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "I8", (out, inner // 2))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (out, inner // TILE))


def _block(prefix: str, spec: ModelSpec, experts: int) -> Iterator[TensorSpec]:
    """What every layer and every draft stage has."""
    hidden, inter = spec.hidden_size, spec.moe_intermediate_size
    query, o_rows = spec.num_attention_heads * HEAD_DIM, spec.o_groups * spec.o_lora_rank
    mixes = STREAMS * (STREAMS + 2)
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}{part}_norm.weight", "BF16", (hidden,))
        yield TensorSpec(f"{prefix}hc_{part}_fn", "F32", (mixes, STREAMS * hidden))
        yield TensorSpec(f"{prefix}hc_{part}_base", "F32", (mixes,))
        yield TensorSpec(f"{prefix}hc_{part}_scale", "F32", (3,))
    yield from _fp8(f"{prefix}attn.wq_a", spec.q_lora_rank, hidden)
    yield from _fp8(f"{prefix}attn.wq_b", query, spec.q_lora_rank)
    yield from _fp8(f"{prefix}attn.wkv", HEAD_DIM, hidden)
    yield from _fp8(f"{prefix}attn.wo_a", o_rows, query // spec.o_groups)
    yield from _fp8(f"{prefix}attn.wo_b", hidden, o_rows)
    yield TensorSpec(f"{prefix}attn.q_norm.weight", "BF16", (spec.q_lora_rank,))
    yield TensorSpec(f"{prefix}attn.kv_norm.weight", "BF16", (HEAD_DIM,))
    yield TensorSpec(f"{prefix}attn.attn_sink", "F32", (spec.num_attention_heads,))
    yield TensorSpec(f"{prefix}ffn.gate.weight", "BF16", (experts, hidden))
    yield TensorSpec(f"{prefix}ffn.gate.bias", "F32", (experts,))
    if spec.has_image_bias:
        yield TensorSpec(f"{prefix}ffn.gate.bias_vl", "F32", (experts,))
    for expert in range(experts):
        yield from _fp4(f"{prefix}ffn.experts.{expert}.w1", inter, hidden)
        yield from _fp4(f"{prefix}ffn.experts.{expert}.w2", hidden, inter)
        yield from _fp4(f"{prefix}ffn.experts.{expert}.w3", inter, hidden)
    yield from _fp8(f"{prefix}ffn.shared_experts.w1", inter, hidden)
    yield from _fp8(f"{prefix}ffn.shared_experts.w2", hidden, inter)
    yield from _fp8(f"{prefix}ffn.shared_experts.w3", inter, hidden)


def _sources(prefix: str, spec: ModelSpec, layer: Layer) -> Iterator[TensorSpec]:
    """The compressor of a KV source (ungated at ratio 1) and the indexer of an index source."""
    if layer.owns_kv:
        yield TensorSpec(f"{prefix}compressor.wkv.weight", "BF16", (HEAD_DIM, spec.hidden_size))
        if layer.ratio > 1:
            yield TensorSpec(f"{prefix}compressor.wgate.weight", "BF16", (HEAD_DIM, spec.hidden_size))
        yield TensorSpec(f"{prefix}compressor.norm.weight", "BF16", (HEAD_DIM,))
        yield TensorSpec(f"{prefix}indexer.wk.weight", "BF16", (INDEX_DIM, HEAD_DIM))
        yield TensorSpec(f"{prefix}indexer.k_norm.weight", "BF16", (INDEX_DIM,))
    if layer.owns_index:
        yield from _fp8(f"{prefix}indexer.wq_b", spec.index_n_heads * INDEX_DIM, spec.q_lora_rank)
        yield TensorSpec(f"{prefix}indexer.weights_proj.weight", "BF16", (spec.index_n_heads, spec.hidden_size))


def _engram(prefix: str, spec: ModelSpec, rows: int) -> Iterator[TensorSpec]:
    columns = (spec.engram_max_ngram_size - 1) * spec.engram_n_heads
    yield TensorSpec(f"{prefix}embed.weight", "F8_E4M3", (rows, ENGRAM_DIM))
    yield TensorSpec(f"{prefix}embed.scale", "F8_E8M0", (rows, ENGRAM_SCALES))
    yield from _fp8(f"{prefix}wkv", (STREAMS + 1) * spec.hidden_size, columns * ENGRAM_DIM)
    yield TensorSpec(f"{prefix}q_weight", "BF16", (STREAMS, spec.hidden_size))
    yield TensorSpec(f"{prefix}k_weight", "BF16", (STREAMS, spec.hidden_size))


def _draft(spec: ModelSpec) -> Iterator[TensorSpec]:
    hidden, last = spec.hidden_size, spec.num_nextn_predict_layers - 1
    for stage in range(last + 1):
        prefix = f"mtp.{stage}."
        yield from _block(prefix, spec, spec.dspark_n_routed_experts)
        if stage == 0:
            yield from _fp8(f"{prefix}main_proj", hidden, hidden * len(spec.dspark_target_layer_ids))
            yield TensorSpec(f"{prefix}main_norm.weight", "BF16", (hidden,))
        if stage == last:
            rank = spec.dspark_markov_rank
            yield TensorSpec(f"{prefix}norm.weight", "BF16", (hidden,))
            yield TensorSpec(f"{prefix}markov_head.embed.weight", "BF16", (spec.vocab_size, rank))
            yield TensorSpec(f"{prefix}markov_head.head.weight", "BF16", (spec.vocab_size, rank))
            yield TensorSpec(f"{prefix}confidence_head.proj.weight", "BF16", (1, hidden + rank))


def _vision(vision: Mapping[str, Any], hidden: int) -> Iterator[TensorSpec]:
    dim, inter = vision["hidden_size"], vision["intermediate_size"]

    def linear(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
        yield TensorSpec(f"{name}.weight", "BF16", (out, inner))
        yield TensorSpec(f"{name}.bias", "BF16", (out,))

    yield from linear("vision.patch_embed.proj", dim, 3 * vision["patch_size"] ** 2)
    for block in range(vision["num_hidden_layers"]):
        prefix = f"vision.blocks.{block}."
        yield from linear(f"{prefix}attn.wqkv", 3 * dim, dim)
        yield from linear(f"{prefix}attn.wo", dim, dim)
        yield TensorSpec(f"{prefix}mlp.w1.weight", "BF16", (2 * inter, dim))
        yield TensorSpec(f"{prefix}mlp.w2.weight", "BF16", (dim, inter))
        yield TensorSpec(f"{prefix}norm1.weight", "BF16", (dim,))
        yield TensorSpec(f"{prefix}norm2.weight", "BF16", (dim,))
    yield TensorSpec("vision.norm.weight", "BF16", (dim,))
    yield from linear("aligner.w1", hidden, dim * vision["downsample_ratio"] ** 2)
    yield from linear("aligner.w2", hidden, hidden)
    for name in ("image_start", "image_end", "image_newline"):
        yield TensorSpec(name, "BF16", (hidden,))
