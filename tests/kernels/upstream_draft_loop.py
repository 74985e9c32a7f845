# SPDX-License-Identifier: Apache-2.0
"""Run by test_upstream_parity.py in a process whose Triton interprets: our sampler against upstream's loop.

Greedy drafts of 10,000 requests, whose logits often tie, by the reference and by the Triton kernels; and drafts with
noise, where upstream's loop runs its Triton sampler on the same seeds. The weights' products are exact, so that no
order of summation is involved.
"""

import torch

from benchmarks.rivals import upstream_loop
from vllm.ampere.kernels.registry import Case
from vllm.ampere.kernels.spec_decode.markov_sampler import OP
from vllm.ampere.testing.interpreter import repair

repair()
FUNCTIONS = {i.name: i.function for i in OP.implementations} | {"reference": OP.reference}


def upstream(given):
    call, result = upstream_loop(given)
    call()
    return result(None)


def compare(functions, seed, **sizes):
    """Tokens and recorded logits of each function equal upstream's; returns how many tokens had a tied best logit."""
    case = Case("", {"S": 5, "F": 16} | sizes, OP.cases[0].make)
    want_given = case.inputs(seed)
    want = upstream(want_given)
    for name in functions:
        given = case.inputs(seed)
        assert torch.equal(FUNCTIONS[name](**given), want), f"{name}, seed {seed}, {sizes}"
        if sizes["drafts"]:
            assert torch.equal(given["draft_logits"], want_given["draft_logits"]), f"{name}, seed {seed}, {sizes}"
    given = want_given
    before = torch.cat([given["last_token"][:, None], want[:, :-1]], 1)
    logits = given["base_logits"] + (given["embed"][before].float() @ given["head"].float().t()).bfloat16()
    return int((logits == logits.amax(-1, keepdim=True)).sum(-1).gt(1).sum())


tied = sum(compare(["reference"], seed, R=500, V=700, drafts=False) for seed in range(20))
print(f"greedy reference: {20 * 500} requests equal, {tied} tokens of a tie")
tied = sum(compare(["triton-inside"], seed, R=500, V=64, drafts=False) for seed in range(20, 40))
print(f"greedy triton-inside: {20 * 500} requests equal, {tied} tokens of a tie")
tied = sum(compare(["triton"], seed, R=50, V=1100, drafts=False) for seed in range(40, 44))
print(f"greedy triton: {4 * 50} requests equal, {tied} tokens of a tie")
for requests in (1, 7, 24):
    compare(["triton", "triton-inside", "reference"], requests, R=requests, V=1100, drafts=True)
print(f"noise: {1 + 7 + 24} requests equal")
