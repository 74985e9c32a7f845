# SPDX-License-Identifier: Apache-2.0
"""Run by test_upstream_parity.py: upstream's router of a card, interpreted, against our reference, with images among the tokens."""

import importlib

import torch

from vllm.ampere.kernels.moe.route import OP
from vllm.ampere.testing.compare import assert_close
from vllm.model_executor.layers.fused_moe.router import dsv4_topk as router
from vllm.platforms import current_platform

# The module defines its kernel where the platform is a card's.
type(current_platform).is_cuda = lambda platform: True
importlib.reload(router)

FIRST_IMAGE_ID, IMAGE_IDS, EXPERTS, TOKENS = 400, 5, 384, 80
generator = torch.Generator().manual_seed(5)
logits, bias, image_bias = (torch.randn(*shape, EXPERTS, generator=generator) for shape in ((TOKENS,), (), ()))
ids = FIRST_IMAGE_ID - 2 + torch.arange(TOKENS) % 9
image = (ids >= FIRST_IMAGE_ID) & (ids < FIRST_IMAGE_ID + IMAGE_IDS)
weights, chosen = router.dsv4_topk(
    logits, bias, torch.int32, 1.5, input_ids=ids, bias_vl=image_bias, image_sentinel_lo=FIRST_IMAGE_ID
)
want_weights, want = OP.reference(logits, bias, 6, 1.5, image_bias, image)
assert torch.equal(chosen, want)
assert_close(weights, want_weights, OP.tolerances["weights"])
_, text = OP.reference(logits, bias, 6, 1.5)
unlike = (text != want).any(1)
assert torch.equal(unlike, image), "the two biases choose alike"
print(f"router: {int(image.sum())} image tokens equal")
