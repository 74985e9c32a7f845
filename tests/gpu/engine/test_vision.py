# SPDX-License-Identifier: Apache-2.0
"""Image input: routing biases and engram gates of image spans, against upstream's own path."""

import pytest

from .measures import common, rms

pytestmark = [pytest.mark.gpu, pytest.mark.reads("native-vision", "sm80-vision")]


@pytest.mark.parametrize("step", ["images", "text"])
def test_against_upstream(runs, step):
    """The best 20 log-probabilities of each token up to and at the first token that differs."""
    for ours, native in zip(runs.answers("sm80-vision", step), runs.answers("native-vision", step)):
        assert ours["prompt_tokens"] == native["prompt_tokens"] > 10
        same = common(ours["tokens"], native["tokens"])
        seen = rms(ours["logprobs"][: same + 1], native["logprobs"][: same + 1])
        runs.figures[f"vision, {step} of {ours['prompt_tokens']} tokens"] = f"{same} of 16 equal, rms of the best 20 {seen:.4f}"
        assert seen < 0.15
