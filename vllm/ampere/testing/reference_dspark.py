# SPDX-License-Identifier: Apache-2.0
"""The DSpark draft of DeepSeek-V4.1 in float32 PyTorch (model_spec section 9).

Three small blocks guess the next five tokens at once: a block reads the target's context through the
windows that `ReferenceDecoder.step` fills, and its own five tokens in both directions. A Markov head then
makes the guesses depend on each other, one token on the one before.
"""

from dataclasses import dataclass

import torch

from .reference_decoder import ReferenceDecoder, State

Tensor = torch.Tensor


@dataclass(frozen=True)
class Draft:
    """A block of B guesses.

    Attributes:
        tokens: int64 [B], greedy.
        logits: [B, V], Markov bias included.
        normed: [B, D], final-normed states, that the target's head reads.
        confidence: [B], logit of each guess being accepted if those before it are.
    """

    tokens: Tensor
    logits: Tensor
    normed: Tensor
    confidence: Tensor


class ReferenceDrafter:
    """The draft of a decoder whose spec has draft layers."""

    def __init__(self, decoder: ReferenceDecoder):
        self.decoder = decoder
        self.last = decoder.spec.num_nextn_predict_layers - 1

    @torch.no_grad()
    def draft(self, state: State, token: int) -> Draft:
        """Guess what follows `token`, the newest sampled one, which `state` has not seen. Leaves `state` alone."""
        hidden = self.hidden(state, token)
        normed = self.decoder.norm(hidden, f"mtp.{self.last}.norm")
        return self.chain(token, self.decoder.linear(normed, "head"), hidden, normed)

    def hidden(self, state: State, token: int) -> Tensor:
        """Collapsed states [B, D] of the block: the token, then noise."""
        d, spec = self.decoder, self.decoder.spec
        tokens = torch.full((spec.dspark_block_size,), spec.dspark_noise_token_id)
        tokens[0] = token
        positions = torch.arange(state.tokens, state.tokens + len(tokens))
        image = torch.zeros(len(tokens), dtype=torch.bool)
        x, pre = d.streams(tokens)
        for stage in range(self.last + 1):
            p = f"mtp.{stage}."
            x, pre = d.block(
                p, x, pre,
                attend=lambda u: self.attention(p + "attn.", u, positions, state),
                feed=lambda u: d.experts(p + "ffn.", u, spec.dspark_num_experts_per_tok, image),
            )
        return d.collapse(x, pre)

    def attention(self, p: str, u: Tensor, positions: Tensor, state: State) -> Tensor:
        """Over the context window and the whole block, with no causal order inside the block."""
        d = self.decoder
        q, _ = d.query(p, u, positions, False)
        keys = torch.cat([state.windows[p], d.latent(p, u, positions, False)])
        visible = torch.ones(len(u), len(keys), dtype=torch.bool)
        return d.attention_output(p, d.attend(p, q, keys, visible), positions, False)

    def chain(self, token: int, base: Tensor, hidden: Tensor, normed: Tensor) -> Draft:
        """Greedy tokens, each biased by the one before it."""
        d, p = self.decoder, f"mtp.{self.last}."
        tokens, logits, confidence = [], [], []
        for i in range(len(base)):
            memory = d.weights[p + "markov_head.embed.weight"][token]
            logits.append(d.round(base[i] + d.linear(memory, p + "markov_head.head")))
            judged = torch.cat([self.judged(hidden, normed)[i], memory])
            confidence.append(d.product(judged, p + "confidence_head.proj"))
            token = int(logits[-1].argmax())
            tokens.append(token)
        return Draft(torch.tensor(tokens), torch.stack(logits), normed, torch.cat(confidence))

    def judged(self, hidden: Tensor, normed: Tensor) -> Tensor:
        """The state that the confidence head reads: the released one reads it before the norm."""
        return hidden
