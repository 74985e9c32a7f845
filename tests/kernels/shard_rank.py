# SPDX-License-Identifier: Apache-2.0
"""One rank of test_vocabulary_shards.py: it samples from its shard, exchanging words over gloo, and from the whole.

    python shard_rank.py RANK RANKS FILE
"""

import sys

import torch
import torch.distributed as dist

from vllm.ampere.kernels.registry import Case
from vllm.ampere.kernels.spec_decode.markov_sampler import OP, markov_sampler

VOCAB, REQUESTS = 331, 9
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=ranks)
share = -(-VOCAB // ranks)
own = slice(rank * share, min((rank + 1) * share, VOCAB))
sent_bytes = []


def exchange(words):
    gathered = [torch.empty_like(words) for _ in range(ranks)]
    dist.all_gather(gathered, words)
    sent_bytes.append(words.nbytes)
    return torch.stack(gathered)


equal = tied = 0
for seed, drafts in ((seed, drafts) for seed in range(8) for drafts in (False, True)):
    given = Case("", {"R": REQUESTS, "S": 5, "V": VOCAB, "F": 16, "drafts": drafts}, OP.cases[0].make).inputs(seed)
    # Without a bias and in few values, so that the best is often found in several shards.
    given["base_logits"] = given["base_logits"].round().clamp(max=2)
    given["head"][:, 1:] = 0
    given["base_logits"][2, :, : VOCAB // 2] = float("nan")
    given["base_logits"][3] = float("nan")
    mine = given | {"base_logits": given["base_logits"][..., own].contiguous(), "head": given["head"][own]}
    mine["draft_logits"] = given["draft_logits"].clone() if drafts else None
    tokens, whole = markov_sampler(**mine, first_token=own.start, exchange=exchange), markov_sampler(**given)
    assert torch.equal(tokens, whole), f"seed {seed}, drafts {drafts}: {tokens.tolist()}, whole {whole.tolist()}"
    if drafts:
        recorded = torch.zeros_like(given["draft_logits"])
        recorded[..., own] = given["draft_logits"][..., own]
        torch.testing.assert_close(mine["draft_logits"], recorded, rtol=0, atol=0, equal_nan=True)
    equal += tokens.numel()
    best = [part.amax(-1) for part in given["base_logits"][4:].split(share, -1)]
    tied += int(sum(b == torch.stack(best).amax(0) for b in best).gt(1).sum())
assert len(sent_bytes) == 16 * 5 and set(sent_bytes) == {8 * REQUESTS}
print(f"{equal} tokens equal, {tied} best base logits in several shards")
dist.destroy_process_group()
