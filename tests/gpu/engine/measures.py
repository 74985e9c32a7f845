# SPDX-License-Identifier: Apache-2.0
"""How two sets of log-probabilities [tokens, vocabulary] differ."""

import torch


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    """Over tokens and vocabulary."""
    return (got - want).square().mean().sqrt().item()


def per_token(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """rms over the vocabulary: [tokens]."""
    return (got - want).square().mean(-1).sqrt()


def relative_norm(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the difference, over the spread of `want` around each token's mean."""
    centred = want - want.mean(-1, keepdim=True)
    return ((got - want).norm() / centred.norm()).item()


def top1(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of tokens whose most likely next token is the same."""
    return (got.argmax(-1) == want.argmax(-1)).float().mean().item()


def decided(got: torch.Tensor, want: torch.Tensor, gap: float = 0.3) -> float:
    """`top1` of the tokens whose best in `want` is ahead of its second by more than `gap`; most are, in a real model."""
    best = want.topk(2, -1).values
    clear = best[:, 0] - best[:, 1] > gap
    return top1(got[clear], want[clear])


def behind(got: torch.Tensor, other: torch.Tensor, want: torch.Tensor) -> float:
    """By how many standard deviations `got` names the best token of `want` less often than `other` does.

    Where the two best are nearly equal, rounding tosses a coin; tokens that one of the two names and the other does not are
    such tosses, and their difference spreads as the root of their number.
    """
    best = want.argmax(-1)
    ours, theirs = got.argmax(-1) == best, other.argmax(-1) == best
    lost, won = (theirs & ~ours).sum().item(), (ours & ~theirs).sum().item()
    return (lost - won) / max(1, lost + won) ** 0.5


def common(tokens: list[int], others: list[int]) -> int:
    """How many tokens agree before the first that does not."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others)) if a != b), min(len(tokens), len(others)))
