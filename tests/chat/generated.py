# SPDX-License-Identifier: Apache-2.0
"""Generated conversations and answers: hypothesis strategies, and what the format's writer makes of them."""

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from .dialect import spell

# Text that has no markup, but much that looks like some. The empty string is drawn often enough by itself.
_BITS = st.sampled_from(
    [
        "a",
        "b c",
        "<",
        "</",
        "<b>",
        "｜",
        "DSML",
        '"',
        "\\",
        "\n",
        "\n\n",
        " ",
        "{",
        "}",
        "é",
        "世界",
        "🎉",
        "think>",
        "1.5",
    ]
)
text = st.lists(
    _BITS | st.text(st.characters(exclude_categories=("Cs", "Co", "Cn"), exclude_characters="<\r"), max_size=5),
    max_size=8,
).map("".join)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda name: name not in ("arguments", "input"))
# A string parameter may hold anything but its own closing tag; JSON anything that is JSON.
values = text | json_values
arguments = st.dictionaries(names, values, max_size=4)


@dataclass(frozen=True)
class Generated:
    """One answer of the model.

    Attributes:
        reasoning, content: text.
        calls: (name, arguments) in order.
    """

    reasoning: str
    content: str
    calls: tuple

    def written(self, version: str) -> str:
        """The answer as the format writes it behind an open reasoning."""
        body = "\n".join(
            spell(version, f"«{name}»\n") + self._parameters(version, given) + spell(version, f"\n«/{name}»")
            for name, given in self.calls
        )
        block = "\n\n" + spell(version, "«calls»\n") + body + spell(version, "\n«/calls»") if self.calls else ""
        return f"{self.reasoning}</think>{self.content}{block}"

    @staticmethod
    def _parameters(version: str, given: dict) -> str:
        return "\n".join(
            spell(version, f"«{name}=»" if isinstance(value, str) else f"«{name}:»")
            + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            + spell(version, "«/»")
            for name, value in given.items()
        )

    @property
    def arguments_texts(self) -> list[tuple[str, str]]:
        return [(name, json.dumps(given, ensure_ascii=False)) for name, given in self.calls]


def _holds_no_markup(made: Generated) -> bool:
    """Blanks that the format puts around a block are its own, and tags in a text are not text."""
    tags = ("<think>", "</think>", "｜DSML｜", "<｜")
    plain = not any(tag in part for part in (made.reasoning, made.content) for tag in tags)
    return plain and not (made.calls and (not made.content.strip() or made.content.endswith("\n")) and made.content)


answers = st.builds(Generated, text, text, st.lists(st.tuples(names, arguments), max_size=3).map(tuple)).filter(
    _holds_no_markup
)
_SOUP = (
    "<think>",
    "</think>",
    "«calls»",
    "«/calls»",
    "«f»",
    "«/f»",
    "«a=»",
    "«n:»",
    "«/»",
    "«arguments=»",
    "\n",
    "\n\n",
    " ",
    "x",
    "<",
    "</",
    "<｜",
    "</｜DSML｜",
    "{",
    "}",
    '{"k": 1}',
    '"',
    "<b>",
    "｜DSML｜",
    "<｜end▁of▁sentence｜>",
    '<｜DSML｜ invoke name="f" ',
)
# Markup in any order, the spellings of both versions mixed.
soups = st.lists(
    st.tuples(st.sampled_from(_SOUP), st.sampled_from(("v4", "v41"))).map(lambda made: spell(made[1], made[0])),
    max_size=30,
).map("".join)
_user = text.map(lambda content: {"role": "user", "content": content})
_system = text.map(lambda content: {"role": "system", "content": content})
_developer = text.filter(bool).map(lambda content: {"role": "developer", "content": content})


def _answered(made: Generated) -> list[dict]:
    """The answer as a client sends it back, with a result for each call."""
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(made.arguments_texts)
    ]
    message = {"role": "assistant", "content": made.content, "reasoning": made.reasoning}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {i}"} for i, call in enumerate(calls)]
    return [message | ({"tool_calls": calls} if calls else {}), *results]


conversations = st.lists(
    st.one_of(
        _user.map(lambda m: [m]), _system.map(lambda m: [m]), _developer.map(lambda m: [m]), answers.map(_answered)
    ),
    min_size=1,
    max_size=6,
).map(lambda turns: sum(turns, []))
