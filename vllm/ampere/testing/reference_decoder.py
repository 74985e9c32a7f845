# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 in float32 PyTorch, whole, to be read and to be compared with.

It follows model_spec.md section by section and shares no code with `vllm.ampere.kernels`, so that the
engine has something to disagree with. One path serves both uses: `logits` runs a whole sequence as one
chunk, `step` runs any chunk against the `State` that the chunks before it left.

What a token meets on its way:

    embedding, repeated into 4 residual streams X
    for each layer
        engram          some layers: n-gram memory is added to X                        section 8
        mix, collapse   4 streams -> 1, by weights that the sublayer before predicted    section 4
        attention       128 tokens of window + a selection of compressed history         section 5
        expand          1 -> 4 streams
        mix, collapse, mixture of experts, expand                                        section 6
    collapse, norm, head

Compressed history is written by few layers (KV sources) and read by many; so is the selection (index
sources). What the engine rounds is gathered in one `Rounding`. Each rule is a small method: a test that
asks whether a comparison would notice a broken rule overrides one of them, or one number of the spec.
"""

import math
from dataclasses import dataclass
from typing import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from ..cache_layout import ENGRAM_GROUP, HEAD_DIM, INDEX_DIM, ROPE_DIM
from ..model_spec import STREAMS, Layer, ModelSpec
from .reference_rounding import FLOAT32, Rounding

Tensor = torch.Tensor


@dataclass
class State:
    """What a sequence carries from one chunk to the next. Tensors are replaced, never written into.

    Attributes:
        tokens: how many have been seen.
        windows: attention prefix ("layers.3.attn.", "mtp.0.attn.") -> the last latents [<= window, 512].
        compressed: KV source layer -> compressed latents [rows, 512]; row j covers tokens j*ratio and on.
        index_keys: KV source layer -> index keys [rows, 128].
        unpaired: KV source layer of ratio 2 -> [values | gates] of a token that waits for its partner.
        history: int64, compressed ids of the last tokens for the engram, -1 where there is none to see.
    """

    tokens: int
    windows: dict[str, Tensor]
    compressed: dict[int, Tensor]
    index_keys: dict[int, Tensor]
    unpaired: dict[int, Tensor]
    history: Tensor

    def copy(self) -> "State":
        """An independent state at the same point, to go back to."""
        return State(self.tokens, dict(self.windows), dict(self.compressed), dict(self.index_keys),
                     dict(self.unpaired), self.history)


@dataclass
class Chunk:
    """What the layers of one step hand to each other.

    Attributes:
        positions: int64 [S], token positions.
        image: bool [S], tokens inside an image span.
        ngrams: int64 [S, n], compressed ids of each token and those before it, newest first.
        selected: bool [S, rows], compressed rows that the last index source lets each token read.
        candidates: bool [S, rows], rows inside the candidate blocks.
    """

    positions: Tensor
    image: Tensor
    ngrams: Tensor
    selected: Tensor | None = None
    candidates: Tensor | None = None


class ReferenceDecoder:
    """The model.

    Args:
        spec: dimensions and layer map.
        weights: tensors by released name, as `reference_weights.load_weights` returns them.
        token_classes: compressed id of every token of the vocabulary; needed where the spec has engrams.
        rounding: what is lost besides; nothing by default.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], token_classes: Sequence[int] = (),
                 rounding: Rounding = FLOAT32):
        self.spec, self.weights, self.rounding = spec, weights, rounding
        self.token_classes = torch.as_tensor(token_classes, dtype=torch.int64)
        self.frequencies = {False: main_frequencies(spec), True: compress_frequencies(spec)}

    # ------------------------------------------------------------------ whole passes

    def logits(self, tokens: Sequence[int], image: Sequence[bool] | None = None) -> Tensor:
        """Logits [S, V] after each token of a whole sequence."""
        return self.step(self.start(), tokens, image)

    def start(self) -> State:
        """The state before the first token."""
        spec = self.spec
        sources = spec.kv_source_layer_ids
        attentions = [f"layers.{i}.attn." for i in range(spec.num_hidden_layers)]
        attentions += [f"mtp.{k}.attn." for k in range(spec.num_nextn_predict_layers)]
        return State(
            tokens=0,
            windows={p: torch.zeros(0, HEAD_DIM) for p in attentions},
            compressed={i: torch.zeros(0, HEAD_DIM) for i in sources},
            index_keys={i: torch.zeros(0, INDEX_DIM) for i in sources},
            unpaired={i: torch.zeros(0, 2 * HEAD_DIM) for i in sources if spec.compress_ratios[i] == 2},
            history=torch.full((spec.engram_max_ngram_size - 1,), -1),
        )

    @torch.no_grad()
    def step(self, state: State, tokens: Sequence[int], image: Sequence[bool] | None = None) -> Tensor:
        """Logits [S, V] after each of the next S tokens; moves `state` past them.

        Args:
            state: from `start`, or left by the step before.
            tokens: S >= 1 token ids.
            image: which of them lie in an image span; none by default.
        """
        spec = self.spec
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        image = torch.zeros(len(tokens), dtype=torch.bool) if image is None else torch.as_tensor(image)
        positions = torch.arange(state.tokens, state.tokens + len(tokens))
        chunk = Chunk(positions, image, self.ngrams(state, tokens, image))
        x, pre = self.streams(tokens)
        taps = []
        for layer in spec.layers:
            p = f"layers.{layer.index}."
            if layer.engram is not None:
                x = self.engram(layer, x, chunk)
            if layer.index in spec.dspark_target_layer_ids:
                taps.append(self.round(x.mean(1)))
            x, pre = self.block(
                p, x, pre,
                attend=lambda u: self.attention(layer, u, state, chunk),
                feed=lambda u: self.experts(p + "ffn.", u, spec.num_experts_per_tok, image),
            )
        state.tokens += len(tokens)
        if spec.num_nextn_predict_layers:
            self.draft_context(taps, positions, state)
        return self.linear(self.norm(self.collapse(x, pre), "norm"), "head")

    def streams(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Residual streams [S, 4, D], all equal to the embedding, and a first collapse that takes stream 0."""
        x = self.weights["embed.weight"][tokens].unsqueeze(1).repeat(1, STREAMS, 1)
        pre = torch.zeros(len(tokens), STREAMS)
        pre[:, 0] = 1
        return x, pre

    def block(self, p: str, x: Tensor, pre: Tensor, attend: Callable[[Tensor], Tensor],
              feed: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Two sublayers. Each collapses with the `pre` that the sublayer before it predicted."""
        next_pre, post, comb = self.mix(x, p + "hc_attn")
        u = self.norm(self.collapse(x, pre), p + "attn_norm")
        x = self.expand(attend(u), x, post, comb)
        pre = next_pre
        next_pre, post, comb = self.mix(x, p + "hc_ffn")
        u = self.norm(self.collapse(x, pre), p + "ffn_norm")
        x = self.expand(feed(u), x, post, comb)
        return x, next_pre

    # ------------------------------------------------------------------ primitives (section 3)

    def round(self, x: Tensor) -> Tensor:
        return self.rounding.activation(x)

    def product(self, x: Tensor, name: str) -> Tensor:
        """weight . x, kept in float32 by every implementation."""
        return x @ self.weights[name + ".weight"].T

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.round(self.product(x, name))

    def inverse_rms(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.round(x * self.inverse_rms(x) * self.weights[name + ".weight"])

    def rotate(self, x: Tensor, positions: Tensor, compress: bool, inverse: bool = False) -> Tensor:
        """Turn adjacent pairs of the last 64 dims of x [S, ..., D] by position * frequency."""
        angle = torch.outer(positions.float(), self.frequencies[compress])
        turn = torch.polar(torch.ones_like(angle), -angle if inverse else angle)
        pairs = torch.view_as_complex(x[..., -ROPE_DIM:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn.view(len(x), *[1] * (x.dim() - 2), ROPE_DIM // 2)).flatten(-2)
        return self.round(torch.cat([x[..., :-ROPE_DIM], turned], -1))

    # ------------------------------------------------------------------ residual streams (section 4)

    def mix(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """From streams [S, 4, D]: pre [S, 4], post [S, 4], and comb [S, 4 sources, 4 destinations]."""
        w, eps, flat = self.weights, self.spec.hc_eps, x.flatten(1)
        z = flat @ w[name + "_fn"].T * self.inverse_rms(flat)
        scale = w[name + "_scale"].repeat_interleave(torch.tensor([STREAMS, STREAMS, STREAMS**2]))
        pre, post, comb = (z * scale + w[name + "_base"]).split((STREAMS, STREAMS, STREAMS**2), -1)
        comb = comb.unflatten(-1, (STREAMS, STREAMS)).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.spec.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return pre.sigmoid() + eps, 2 * post.sigmoid(), comb

    def collapse(self, x: Tensor, pre: Tensor) -> Tensor:
        return self.round(torch.einsum("sj,sjd->sd", pre, x))

    def expand(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return self.round(torch.einsum("sk,sd->skd", post, y) + torch.einsum("sjk,sjd->skd", comb, x))

    # ------------------------------------------------------------------ attention (section 5)

    def attention(self, layer: Layer, u: Tensor, state: State, chunk: Chunk) -> Tensor:
        p, compress = f"layers.{layer.index}.attn.", layer.ratio > 0
        q, q_latent = self.query(p, u, chunk.positions, compress)
        keys, visible = self.window(p, u, chunk.positions, compress, state)
        if compress:
            if layer.owns_kv:
                self.compress(layer, u, state)
            if layer.owns_index:
                chunk.selected = self.select(layer, u, q_latent, state, chunk)
            keys = torch.cat([keys, state.compressed[layer.kv_source]])
            visible = torch.cat([visible, chunk.selected], 1)
        return self.attention_output(p, self.attend(p, q, keys, visible), chunk.positions, compress)

    def query(self, p: str, u: Tensor, positions: Tensor, compress: bool) -> tuple[Tensor, Tensor]:
        """Rotated queries [S, H, 512], and the latent [S, rank] that the indexer shares."""
        latent = self.norm(self.linear(u, p + "wq_a"), p + "q_norm")
        heads = self.linear(latent, p + "wq_b").unflatten(-1, (-1, HEAD_DIM))
        return self.rotate(heads, positions, compress), latent

    def latent(self, p: str, u: Tensor, positions: Tensor, compress: bool) -> Tensor:
        """The one vector per token that is key and value of every head, as its cache returns it."""
        kv = self.norm(self.linear(u, p + "wkv"), p + "kv_norm")
        return self.rounding.window(self.rotate(kv, positions, compress))

    def window(self, p: str, u: Tensor, positions: Tensor, compress: bool, state: State) -> tuple[Tensor, Tensor]:
        """Latents of the window before the chunk and of the chunk, and which of them each token sees."""
        width = self.spec.sliding_window
        keys = torch.cat([state.windows[p], self.latent(p, u, positions, compress)])
        state.windows[p] = keys[-width:]
        age = positions[:, None] - torch.arange(len(keys)) - (positions[-1] + 1 - len(keys))
        return keys, (age >= 0) & (age < width)

    def sink(self, p: str) -> Tensor:
        return self.weights[p + "attn_sink"]

    def attend(self, p: str, q: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        """Soft-max attention of q [S, H, 512] over keys [K, 512] where `visible` [S, K].

        Each head's sink adds to the denominator and brings no value.
        """
        logits = torch.einsum("shd,kd->shk", q, keys) * HEAD_DIM**-0.5
        logits = logits.masked_fill(~visible[:, None], -math.inf)
        sink = self.sink(p)[None, :, None].expand(len(q), -1, 1)
        probabilities = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        return self.round(torch.einsum("shk,kd->shd", probabilities, keys))

    def attention_output(self, p: str, o: Tensor, positions: Tensor, compress: bool) -> Tensor:
        """Turn the values back by the query's position, then two projections, the first by head group."""
        groups = self.spec.o_groups
        o = self.rotate(o, positions, compress, inverse=True).reshape(len(o), groups, -1)
        wo_a = self.weights[p + "wo_a.weight"].unflatten(0, (groups, -1))
        return self.linear(self.round(torch.einsum("sgv,grv->sgr", o, wo_a)).flatten(1), p + "wo_b")

    # ------------------------------------------------------------------ compressed history and its selection

    def compress(self, layer: Layer, u: Tensor, state: State) -> None:
        """Append the rows that this chunk completes: at ratio 2, two tokens pool per channel into one."""
        p, source, ratio = f"layers.{layer.index}.attn.", layer.index, layer.ratio
        pooled = self.product(u, p + "compressor.wkv")
        if ratio == 2:
            waiting = torch.cat([pooled, self.product(u, p + "compressor.wgate")], -1)
            waiting = torch.cat([state.unpaired[source], waiting])
            whole = len(waiting) // 2 * 2
            state.unpaired[source] = waiting[whole:]
            values, gates = waiting[:whole].unflatten(0, (-1, 2)).chunk(2, -1)
            pooled = (gates.softmax(1) * values).sum(1)
        latent = self.norm(pooled, p + "compressor.norm")
        first = len(state.compressed[source])
        positions = torch.arange(first, first + len(latent)) * ratio
        row = self.rounding.compressed(self.rotate(latent, positions, True))
        key = self.norm(self.linear(latent, p + "indexer.wk"), p + "indexer.k_norm")
        key = self.rounding.index(self.rotate(key, positions, True))
        state.compressed[source] = torch.cat([state.compressed[source], row])
        state.index_keys[source] = torch.cat([state.index_keys[source], key])

    def select(self, layer: Layer, u: Tensor, q_latent: Tensor, state: State, chunk: Chunk) -> Tensor:
        """Which compressed rows each token reads: bool [S, rows], the best `index_topk` of those complete."""
        keys = state.index_keys[layer.kv_source]
        complete = (chunk.positions + 1) // layer.ratio
        scores = self.index_scores(f"layers.{layer.index}.attn.indexer.", u, q_latent, keys, chunk.positions)
        scores = scores.masked_fill(torch.arange(len(keys)) >= complete[:, None], -math.inf)
        if layer.candidates == "source":
            chunk.candidates = self.candidates(scores, complete)
        elif layer.candidates == "masked":
            scores = scores.masked_fill(~chunk.candidates, -math.inf)
        return keep_best(scores, self.spec.index_topk)

    def index_scores(self, p: str, u: Tensor, q_latent: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """[S, rows]: over heads, the positive part of q.k, weighted by what the token says of each head."""
        heads = self.spec.index_n_heads
        q = self.rotate(self.linear(q_latent, p + "wq_b").unflatten(-1, (heads, INDEX_DIM)), positions, True)
        weights = self.linear(u, p + "weights_proj") * INDEX_DIM**-0.5 * heads**-0.5
        return torch.einsum("shk,sh->sk", torch.einsum("shd,kd->shk", self.rounding.index(q), keys).relu(), weights)

    def candidates(self, scores: Tensor, complete: Tensor) -> Tensor:
        """Rows in the best blocks, a block counting as its best row; the newest block is always in."""
        size, rows = self.spec.candidate_block_size, scores.shape[1]
        blocks = F.pad(scores, (0, -rows % size), value=-math.inf).unflatten(-1, (-1, size)).amax(-1)
        newest = torch.arange(blocks.shape[1]) == ((complete - 1) // size)[:, None]
        kept = keep_best(blocks.masked_fill(newest, math.inf), self.spec.candidate_topk_blocks)
        return kept.repeat_interleave(size, 1)[:, :rows]

    # ------------------------------------------------------------------ mixture of experts (section 6)

    def experts(self, p: str, u: Tensor, per_token: int, image: Tensor) -> Tensor:
        """The weighted routed experts, summed in float32, plus the shared one."""
        scores = F.softplus(self.rounding.router(self.product(u, p + "gate"))).sqrt()
        chosen = (scores + self.routing_bias(p, image)).topk(per_token).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.spec.routed_scaling_factor
        routed = torch.zeros_like(u)
        for expert in chosen.unique().tolist():
            token, place = torch.nonzero(chosen == expert, as_tuple=True)
            y = self.swiglu(f"{p}experts.{expert}.", u[token], self.product, F.silu)
            routed.index_add_(0, token, y * weights[token, place, None])
        shared = self.swiglu(p + "shared_experts.", u, self.linear, self.silu_in_steps)
        return self.round(self.round(routed) + shared)

    def routing_bias(self, p: str, image: Tensor) -> Tensor:
        """Added for the choice of experts only, not to their weights; image spans have their own."""
        bias = self.weights[p + "gate.bias"]
        return torch.where(image[:, None], self.weights[p + "gate.bias_vl"], bias) if image.any() else bias

    def swiglu(self, p: str, u: Tensor, linear: Callable[[Tensor, str], Tensor],
               silu: Callable[[Tensor], Tensor]) -> Tensor:
        limit = self.spec.swiglu_limit
        gate, value = linear(u, p + "w1").clamp(max=limit), linear(u, p + "w3").clamp(-limit, limit)
        return linear(self.round(silu(gate) * value), p + "w2")

    def silu_in_steps(self, gate: Tensor) -> Tensor:
        return self.rounding.shared_silu(gate * self.rounding.shared_silu(gate.sigmoid()))

    # ------------------------------------------------------------------ engram (section 8)

    def ngrams(self, state: State, tokens: Tensor, image: Tensor) -> Tensor:
        """Compressed ids of each token and of those before it; image spans and the start cut the view off."""
        if not self.spec.engram_layer_ids:
            return torch.zeros(len(tokens), 0, dtype=torch.int64)
        length = self.spec.engram_max_ngram_size
        seen = torch.cat([state.history, self.token_classes[tokens].masked_fill(image, -1)])
        state.history = seen[-(length - 1):]
        newest_first = seen.unfold(0, length, 1).flip(-1)
        cut = (newest_first < 0).cumsum(-1) > 0
        return newest_first.masked_fill(cut, self.token_classes[self.spec.engram_pad_token_id])

    def engram_rows(self, layer: Layer, ngrams: Tensor) -> Tensor:
        """Table rows [S, orders * heads]: a hash of the last 2, 3, ... ids, modulo each column's own prime."""
        terms = ngrams * engram_multipliers(self.spec, layer.index)
        rolling, first, rows = terms[:, 0], 0, []
        for order, primes in enumerate(self.spec.engram_primes[layer.engram], start=1):
            rolling = rolling ^ terms[:, order]
            for prime in primes:
                rows.append(first + rolling % prime)
                first += prime
        return torch.stack(rows, -1)

    def engram(self, layer: Layer, x: Tensor, chunk: Chunk) -> Tensor:
        """Add one value to all streams, as far as each stream agrees with its key."""
        p, dim, w = f"layers.{layer.index}.engram.", self.spec.hidden_size, self.weights
        rows = self.engram_rows(layer, chunk.ngrams)
        scale = w[p + "embed.scale"][rows].float()
        memory = (w[p + "embed.weight"][rows].float().unflatten(-1, (-1, ENGRAM_GROUP)) * scale[..., None]).flatten(1)
        key, value = self.linear(self.round(memory), p + "wkv").split((STREAMS * dim, dim), -1)
        key = key.unflatten(-1, (STREAMS, dim))
        agreement = (x * w[p + "q_weight"] * w[p + "k_weight"] * key).sum(-1)
        agreement = agreement * (self.inverse_rms(x) * self.inverse_rms(key)).squeeze(-1) * dim**-0.5
        gate = torch.sigmoid(agreement.sign() * agreement.abs().clamp(min=1e-6).sqrt())
        gate = gate.masked_fill(chunk.image[:, None], 0.0)
        return self.round(x + gate[..., None] * value[:, None])

    # ------------------------------------------------------------------ what the draft reads (section 9)

    def draft_context(self, taps: list[Tensor], positions: Tensor, state: State) -> None:
        """Project the tapped streams [S, D] and put them into each draft stage's window."""
        main = self.norm(self.linear(torch.cat(taps, -1), "mtp.0.main_proj"), "mtp.0.main_norm")
        for stage in range(self.spec.num_nextn_predict_layers):
            self.window(f"mtp.{stage}.attn.", main, positions, False, state)


def main_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per token of each of the 32 rotated pairs, in layers that see the window only."""
    return 1 / spec.rope_theta ** (torch.arange(0, ROPE_DIM, 2) / ROPE_DIM)


def compress_frequencies(spec: ModelSpec) -> Tensor:
    """The same in layers that compress: another base, and YaRN's slower turning of the slow pairs."""
    base = spec.compress_rope_theta

    def pair_that_turns(times: float) -> float:
        length = spec.rope_original_max_position_embeddings
        return ROPE_DIM * math.log(length / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(spec.rope_beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(spec.rope_beta_slow)), ROPE_DIM - 1)
    fast = 1 / base ** (torch.arange(0, ROPE_DIM, 2) / ROPE_DIM)
    ramp = ((torch.arange(ROPE_DIM // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return fast * (1 - ramp) + fast / spec.rope_factor * ramp


def engram_multipliers(spec: ModelSpec, layer: int) -> Tensor:
    """Odd int64 [n], one for each look-back distance; products with a compressed id stay below 2**63."""
    bound = max(1, (2**63 - 1) // spec.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, spec.engram_max_ngram_size, dtype=np.int64)
    return torch.as_tensor(drawn * 2 + 1)


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` largest entries of each row, the first of equal ones; never one that is -inf."""
    order = scores.sort(descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True) & (scores > -math.inf)
