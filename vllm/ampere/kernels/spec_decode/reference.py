# SPDX-License-Identifier: Apache-2.0
"""The DSpark Markov head in plain PyTorch, float32 (model_spec section 9)."""

import torch

from ..row_tiles import row_matmul

LAST_TOKEN = 2**31 - 1
_U32 = 0xFFFFFFFF
_SALT = 1 << 30


def best_word(scores: torch.Tensor, first_token: int = 0) -> torch.Tensor:
    """The largest score of each row and its token as one positive number that is larger the better.

    The upper 32 bits order the scores (NaN lowest), the lower 31 hold the token, inverted: of equal scores the lower
    token has the larger word.

    Args:
        scores: float32 [R, V], V at least 1.
        first_token: token of column 0.

    Returns:
        int64 [R].
    """
    bits = scores.contiguous().view(torch.int32)
    key = torch.where(bits < 0, torch.where(bits == -(2**31), 0, bits ^ LAST_TOKEN), bits).long()
    key = torch.where(scores.isnan(), 0, key + 2**31)
    token = first_token + torch.arange(scores.shape[1], device=scores.device)
    return ((key << 31) | (LAST_TOKEN - token)).amax(1)


def token_of(word: torch.Tensor) -> torch.Tensor:
    """The token that a word of `best_word` holds."""
    return LAST_TOKEN - (word & LAST_TOKEN)


def _mixed(h, word):
    word = word * 0xCC9E2D51 & _U32
    word = (word << 15 | word >> 17) & _U32
    h = h ^ word * 0x1B873593 & _U32
    return ((h << 13 | h >> 19) & _U32) * 5 + 0xE6546B64 & _U32


def draft_noise_ref(seed: torch.Tensor, step: int, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`draft_noise` for int64 seeds [R], positions [R] and tokens [V]; returns float32 [R, V]."""
    seed, position = seed ^ (step << 32), position - 1 + _SALT
    h = torch.zeros_like(seed)
    for word in (seed & _U32, seed >> 32 & _U32, position & _U32):
        h = _mixed(h, word)
    h = _mixed(h[:, None], token[None, :]) ^ 16
    h = (h ^ h >> 16) * 0x85EBCA6B & _U32
    h = (h ^ h >> 13) * 0xC2B2AE35 & _U32
    h = h ^ h >> 16
    u = (h >> 16).float() * 2.0**-16 + ((h & 0xFFFF).float() + 0.5) * 2.0**-32
    series = torch.full_like(u, 0.125)
    for n in range(7, 0, -1):
        series = 1 / n + u * series
    complement = torch.where(u < 0.25, -u * series, (1 - u).clamp_min(2.0**-24).log())
    return -(-complement).log()


def markov_sampler_ref(
    base_logits, embed, head, last_token, request, position, temperature, seeds, draft_logits=None, first_token=0,
    exchange=None,
):  # fmt: skip
    """See `markov_sampler`."""
    requests, steps, vocab = base_logits.shape
    dtype, head = base_logits.dtype, head.float()
    tokens = torch.empty(requests, steps, dtype=torch.int64, device=base_logits.device)
    token = first_token + torch.arange(vocab, device=tokens.device)
    for step in range(steps):
        bias = row_matmul(embed[last_token.long()].float(), head).to(dtype)
        logits = base_logits[:, step] + bias
        scores = logits.float()
        if draft_logits is not None:
            live = request[:, step] >= 0
            row = request[live, step]
            draft_logits[row, step, first_token : first_token + vocab] = logits[live]
            hot, degrees = scores[live], temperature[row][:, None]
            noise = draft_noise_ref(seeds[row], step, position[live, step], token)
            scores[live] = torch.where(degrees != 0, hot / torch.where(degrees != 0, degrees, 1) + noise, hot)
        word = best_word(scores, first_token) if vocab else tokens.new_zeros(requests)
        last_token = tokens[:, step] = token_of(word if exchange is None else exchange(word).amax(0))
    return tokens
