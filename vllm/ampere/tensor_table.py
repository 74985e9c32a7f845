# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a V4.1 checkpoint: name, dtype, shape and shard, derived from its config.json.

Names are those of the release: bare (no `model.` prefix), dense weights in E4M3 with one UE8M0 byte a
32x32 tile, routed experts in packed E2M1 (two codes a byte) with one UE8M0 byte a row and 32 inputs.
Source: model_spec sections 7, 8 and 11. Imports neither torch nor vLLM.
"""

import math
from typing import Iterator, NamedTuple

from .cache_layout import ENGRAM_GROUP, HEAD_DIM, INDEX_DIM

# Bytes an element, by the dtype names of the safetensors format.
DTYPE_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}
TILE = 32
HC_STREAMS = 4
HC_MIXES = HC_STREAMS * (HC_STREAMS + 2)


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


def expected_tensors(config: dict) -> Iterator[TensorSpec]:
    """The tensors that a checkpoint with this config.json holds, in the order of the release's shards.

    Args:
        config: config.json as a dict, nested as released (`text_config`, `vision_config`).
    """
    text = config["text_config"]
    vision = config.get("vision_config") or {}
    with_vision = vision.get("num_hidden_layers", 0) > 0
    hidden, vocab, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    if with_vision:
        yield from _vision(vision, hidden)
    yield TensorSpec("embed.weight", "BF16", (vocab, hidden))
    for layer in range(layers):
        yield from _block(f"layers.{layer}.", text, text["n_routed_experts"], with_vision)
        yield from _sources(f"layers.{layer}.attn.", text, layer)
    yield TensorSpec("head.weight", "BF16", (vocab, hidden))
    yield TensorSpec("norm.weight", "BF16", (hidden,))
    yield from _draft(text, with_vision)
    for layer, rows in zip(text["engram_layer_ids"], text["engram_num_embeddings"]):
        yield from _engram(f"layers.{layer}.engram.", text, rows)


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


def engram_primes(text: dict) -> list[list[list[int]]]:
    """Rows of every hash column, [layer][n-gram order][head]: one pool of primes, none used twice.

    The columns of a layer are disjoint row ranges of its table, so a table needs at least the sum of its
    layer's primes in rows.
    """
    used: set[int] = set()
    layers = []
    for _ in text["engram_layer_ids"]:
        orders = []
        for _ in range(text["engram_max_ngram_size"] - 1):
            heads: list[int] = []
            candidate = text["engram_vocab_size"]
            while len(heads) < text["engram_n_heads"]:
                if candidate not in used and _is_prime(candidate):
                    used.add(candidate)
                    heads.append(candidate)
                candidate += 1
            orders.append(heads)
        layers.append(orders)
    return layers


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _fp8(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "F8_E4M3", (out, inner))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (-(-out // TILE), -(-inner // TILE)))


def _fp4(name: str, out: int, inner: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.weight", "I8", (out, inner // 2))
    yield TensorSpec(f"{name}.scale", "F8_E8M0", (out, inner // TILE))


def _block(prefix: str, text: dict, experts: int, with_vision: bool) -> Iterator[TensorSpec]:
    """What every layer and every draft stage has."""
    hidden, inter = text["hidden_size"], text["moe_intermediate_size"]
    heads, q_rank = text["num_attention_heads"], text["q_lora_rank"]
    groups, o_rows = text["o_groups"], text["o_groups"] * text["o_lora_rank"]
    for part in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}{part}_norm.weight", "BF16", (hidden,))
        yield TensorSpec(f"{prefix}hc_{part}_fn", "F32", (HC_MIXES, HC_STREAMS * hidden))
        yield TensorSpec(f"{prefix}hc_{part}_base", "F32", (HC_MIXES,))
        yield TensorSpec(f"{prefix}hc_{part}_scale", "F32", (3,))
    yield from _fp8(f"{prefix}attn.wq_a", q_rank, hidden)
    yield from _fp8(f"{prefix}attn.wq_b", heads * HEAD_DIM, q_rank)
    yield from _fp8(f"{prefix}attn.wkv", HEAD_DIM, hidden)
    yield from _fp8(f"{prefix}attn.wo_a", o_rows, heads * HEAD_DIM // groups)
    yield from _fp8(f"{prefix}attn.wo_b", hidden, o_rows)
    yield TensorSpec(f"{prefix}attn.q_norm.weight", "BF16", (q_rank,))
    yield TensorSpec(f"{prefix}attn.kv_norm.weight", "BF16", (HEAD_DIM,))
    yield TensorSpec(f"{prefix}attn.attn_sink", "F32", (heads,))
    yield TensorSpec(f"{prefix}ffn.gate.weight", "BF16", (experts, hidden))
    yield TensorSpec(f"{prefix}ffn.gate.bias", "F32", (experts,))
    if with_vision:
        yield TensorSpec(f"{prefix}ffn.gate.bias_vl", "F32", (experts,))
    for expert in range(experts):
        yield from _fp4(f"{prefix}ffn.experts.{expert}.w1", inter, hidden)
        yield from _fp4(f"{prefix}ffn.experts.{expert}.w2", hidden, inter)
        yield from _fp4(f"{prefix}ffn.experts.{expert}.w3", inter, hidden)
    shared = inter * text["n_shared_experts"]
    yield from _fp8(f"{prefix}ffn.shared_experts.w1", shared, hidden)
    yield from _fp8(f"{prefix}ffn.shared_experts.w2", hidden, shared)
    yield from _fp8(f"{prefix}ffn.shared_experts.w3", shared, hidden)


def _sources(prefix: str, text: dict, layer: int) -> Iterator[TensorSpec]:
    """The compressor of a KV source and the indexer of an index source; layer 20 of the release has no gate."""
    hidden, index_heads = text["hidden_size"], text["index_n_heads"]
    if layer in text["kv_source_layer_ids"]:
        yield TensorSpec(f"{prefix}compressor.wkv.weight", "BF16", (HEAD_DIM, hidden))
        if text["compress_ratios"][layer] > 1:
            yield TensorSpec(f"{prefix}compressor.wgate.weight", "BF16", (HEAD_DIM, hidden))
        yield TensorSpec(f"{prefix}compressor.norm.weight", "BF16", (HEAD_DIM,))
        yield TensorSpec(f"{prefix}indexer.wk.weight", "BF16", (INDEX_DIM, HEAD_DIM))
        yield TensorSpec(f"{prefix}indexer.k_norm.weight", "BF16", (INDEX_DIM,))
    if layer in text["index_source_layer_ids"]:
        yield from _fp8(f"{prefix}indexer.wq_b", index_heads * INDEX_DIM, text["q_lora_rank"])
        yield TensorSpec(f"{prefix}indexer.weights_proj.weight", "BF16", (index_heads, hidden))


def _engram(prefix: str, text: dict, rows: int) -> Iterator[TensorSpec]:
    hidden, dim = text["hidden_size"], text["engram_head_dim"]
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    yield TensorSpec(f"{prefix}embed.weight", "F8_E4M3", (rows, dim))
    yield TensorSpec(f"{prefix}embed.scale", "F8_E8M0", (rows, dim // ENGRAM_GROUP))
    yield from _fp8(f"{prefix}wkv", (HC_STREAMS + 1) * hidden, columns * dim)
    yield TensorSpec(f"{prefix}q_weight", "BF16", (HC_STREAMS, hidden))
    yield TensorSpec(f"{prefix}k_weight", "BF16", (HC_STREAMS, hidden))


def _draft(text: dict, with_vision: bool) -> Iterator[TensorSpec]:
    hidden, vocab, last = text["hidden_size"], text["vocab_size"], text["num_nextn_predict_layers"] - 1
    for stage in range(last + 1):
        prefix = f"mtp.{stage}."
        yield from _block(prefix, text, text["dspark_n_routed_experts"], with_vision)
        if stage == 0:
            yield from _fp8(f"{prefix}main_proj", hidden, hidden * len(text["dspark_target_layer_ids"]))
            yield TensorSpec(f"{prefix}main_norm.weight", "BF16", (hidden,))
        if stage == last:
            rank = text["dspark_markov_rank"]
            yield TensorSpec(f"{prefix}norm.weight", "BF16", (hidden,))
            yield TensorSpec(f"{prefix}markov_head.embed.weight", "BF16", (vocab, rank))
            yield TensorSpec(f"{prefix}markov_head.head.weight", "BF16", (vocab, rank))
            yield TensorSpec(f"{prefix}confidence_head.proj.weight", "BF16", (1, hidden + rank))


def _vision(vision: dict, hidden: int) -> Iterator[TensorSpec]:
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
