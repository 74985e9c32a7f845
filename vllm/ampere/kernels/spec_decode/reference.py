# SPDX-License-Identifier: Apache-2.0
"""The DSpark Markov head in plain PyTorch, float32 (model_spec section 9)."""

import torch

from ..row_tiles import row_matmul


def markov_sampler_ref(base_logits, embed, head, last_token, temperature, gumbel):
    """See `markov_sampler`."""
    logits, head = base_logits.float().clone(), head.float()
    hot = temperature > 0
    divisor = torch.where(hot, temperature, 1.0)[:, None]
    tokens = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    for step in range(logits.shape[1]):
        logits[:, step] += row_matmul(embed[last_token].float(), head)
        score = logits[:, step]
        if gumbel is not None:
            score = torch.where(hot[:, None], score / divisor + gumbel[:, step], score)
        last_token = tokens[:, step] = score.argmax(-1)
    return tokens, logits
