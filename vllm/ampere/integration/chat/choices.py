# SPDX-License-Identifier: Apache-2.0
"""The points of the chat format that nobody has settled, what each may be, and what is taken here.

`VLLM_AMPERE_CHAT="name=value,name=value"` takes another value for the whole server.
"""

from typing import NamedTuple

from ... import envs
from ...errors import SelectionError


class Choice(NamedTuple):
    """One open point.

    Attributes:
        values: what it may be; the first is the default.
        about: what the values mean, and who says so.
    """

    values: tuple[str, ...]
    about: str


CHOICES = {
    "v41_effort": Choice(
        ("low50", "low25"),
        "V4.1's budgets for low, high, xhigh, max: 50, 75, 75, 100 in vLLM 0.33.0; 25, 50, 75, 100 in SGLang's copy "
        "of the release encoder. The checkpoint's own encoder decides; it changes every prompt that names no number.",
    ),
    "v4_medium": Choice(
        ("low", "high"),
        "V4's effort for medium: low in vLLM 0.33.0 (vllm#50580); high in DeepSeek's API documentation, as in V4.1.",
    ),
    "unclosed_reasoning": Choice(
        ("reasoning", "content"),
        "an answer that ends by itself inside its reasoning: left there, as in vLLM 0.33.0 (vllm#48645, #52640), or "
        "handed over as content. It is content in any case where the client asked not to see reasoning.",
    ),
    "reasoning_field": Choice(
        ("reasoning", "both"),
        "the field of the reasoning in chat answers: vLLM's name, or DeepSeek's reasoning_content beside it, with the "
        "same text, for clients that know no other. Requests may use either name in any case.",
    ),
    "after_calls": Choice(
        ("drop", "keep"),
        "text behind a closed tool block: the format allows none there and vLLM 0.33.0 drops it; kept, it is content.",
    ),
    "forbidden_calls": Choice(
        ("drop", "text"),
        'a tool block although the request says tool_choice "none": dropped as in vLLM 0.33.0, or shown as text.',
    ),
    "control_text": Choice(
        ("literal", "live"),
        "client text that spells a control token: plain text with the same letters, so that it forges no turn, and in "
        "a user turn the tag of a tool result is escaped (&lt;); or live, as in vLLM 0.33.0 and the release encoder. "
        "Literal costs what such text meant on purpose, and the cached prefix behind a control token that the model "
        "itself said.",
    ),
}


def chosen(name: str) -> str:
    """The value that this server takes at the open point `name`.

    Raises:
        SelectionError: as `check`.
    """
    return check().get(name, CHOICES[name].values[0])


def check() -> dict[str, str]:
    """What `VLLM_AMPERE_CHAT` asks for.

    Raises:
        SelectionError: it names no open point, or a value that the point cannot have.
    """
    asked = envs.chat()
    for point, value in asked.items():
        if point not in CHOICES:
            raise SelectionError(f"VLLM_AMPERE_CHAT names {point!r}", f"it may name {', '.join(CHOICES)}")
        if value not in CHOICES[point].values:
            values = ", ".join(CHOICES[point].values)
            raise SelectionError(f"VLLM_AMPERE_CHAT sets {point} to {value!r}", f"{point} is one of {values}")
    return asked
