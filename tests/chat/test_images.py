# SPDX-License-Identifier: Apache-2.0
"""V4.1's images: each one's place in the prompt, and which of the client's it is."""

import pytest

from .conversations import calls
from .dialect import TOOLS

pytestmark = pytest.mark.vllm
IMAGE = "<｜deepseek_image｜>"


def shown(*kinds: str) -> list[dict]:
    """Content parts: a text for each word, an image for each "image"."""
    return [{"type": "image_url"} if kind == "image" else {"type": "text", "text": kind} for kind in kinds]


MESSAGES = [
    {"role": "system", "content": shown("be", "image")},
    {"role": "user", "content": shown("look", "image", "and", "image")},
    calls('{"path": "a"}', '{"path": "b"}'),
    {"role": "tool", "tool_call_id": "c1", "content": shown("B", "image")},
    {"role": "tool", "tool_call_id": "c0", "content": shown("image")},
    {"role": "developer", "content": shown("image")},
    {"role": "user", "content": shown("image", "now")},
]


def test_images_stand_where_they_were_and_keep_their_number(tokenizers):
    order: list[int] = []
    prompt = tokenizers["v41"].apply_chat_template(MESSAGES, tools=list(TOOLS), tokenize=False, image_order=order)
    # The results are shown in the order of the calls, and their images with them.
    assert order == [0, 1, 2, 4, 3, 5, 6]
    assert prompt.count(IMAGE) == len(order)
    for text in (
        f"be\n\n{IMAGE}",
        f"look\n\n{IMAGE}\n\nand\n\n{IMAGE}",
        f"<tool_result>{IMAGE}</tool_result>\n\n<tool_result>B\n\n{IMAGE}",
        f"<｜User｜>{IMAGE}<｜User｜>{IMAGE}\n\nnow",
    ):
        assert text in prompt


def test_no_image_is_lost_where_reasoning_is_dropped(tokenizers):
    order: list[int] = []
    tokenizers["v41"].apply_chat_template(MESSAGES[4:], tokenize=False, image_order=order)
    assert order == [0, 1, 2]
