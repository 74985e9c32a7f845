# SPDX-License-Identifier: Apache-2.0
"""How wide a routed expert's matrices are in memory, where Marlin multiplies them.

Marlin's tiles take (outputs, inputs) in steps of (64, 128) or (128, 64): vLLM 0.33.0 holds sm_80 code of both for
MXFP4 weights. DeepSeek-V4.1's hidden size is a multiple of 128, and a rank's intermediate size one of 32, the group of
a scale. So gate and up, two intermediate sizes of outputs together, fit as they are; the inputs of the down
projection are the only dimension that may need padding.
"""

DOWN_INPUT_STEP = 64
HIDDEN_STEP = 128
GROUP = 32


def down_inputs(intermediate: int) -> int:
    """Inputs of the down projection in memory, for a rank's intermediate size."""
    return -(-intermediate // DOWN_INPUT_STEP) * DOWN_INPUT_STEP


def fits(hidden: int, intermediate: int) -> bool:
    """Whether padding the inputs of the down projection is enough. A single group would lie in another order."""
    return hidden % HIDDEN_STEP == 0 and intermediate % GROUP == 0 and intermediate > GROUP
