# SPDX-License-Identifier: Apache-2.0
"""The tags of DSML, the tool markup of DeepSeek V4 and V4.1.

V4 writes `<｜DSML｜tool_calls>`, V4.1 `<｜DSML｜ calls>`, and both were seen with other names for the block; a reader
takes every spelling, since none of them is anything else. A writer is the prompt encoder of each version.
"""

from typing import NamedTuple

import regex

DSML = "｜DSML｜"
THINK, END_THINK = "<think>", "</think>"
_BLOCK = r"(?:tool_calls|toolcalls|tool_call|tool|function_calls|calls)"
# Characters; more than two names and the words around them need.
LONGEST_TAG = 640


class Tag(NamedTuple):
    """A tag found in a text.

    Attributes:
        kind: a key of `KINDS`; "" if the text ends inside what may become a tag.
        end: offset behind the tag.
        name: of an invoke or a parameter.
        string: of a parameter: the value of its attribute `string`; None if it has none.
        spelling: of a parameter: what its closing tag has between DSML and the word.
    """

    kind: str
    end: int
    name: str = ""
    string: str | None = None
    spelling: str = ""


KINDS = {
    "block": rf"<{DSML} ?{_BLOCK}>",
    "block_end": rf"</{DSML} ?{_BLOCK}>",
    "invoke": rf'<{DSML} ?invoke\s+name="(?P<invoke_name>[^"\n]{{1,256}})"\s*>',
    "invoke_end": rf"</{DSML} ?invoke>",
    "parameter": rf'<{DSML}(?P<spelling> ?)parameter\s+name="(?P<parameter_name>[^"]{{1,256}})"'
    r'(?:\s+string="(?P<string>[^"]{0,8})")?\s*>',
    "parameter_end": rf"</{DSML} ?parameter>",
    "think": THINK,
    "think_end": END_THINK,
}
# What may stand at the very end of an answer for a parameter's closing tag.
TAIL = regex.compile(rf"{KINDS['invoke_end']}\s*(?:{KINDS['block_end']}\s*)?")


class Reader:
    """Finds the tags of some kinds at an offset of a growing text.

    Args:
        kinds: keys of `KINDS`.
        dropped: more literal texts, all of the kind "dropped".
    """

    def __init__(self, kinds, dropped=()):
        parts = [f"(?P<{kind}>{KINDS[kind]})" for kind in kinds]
        if dropped:
            parts.append(f"(?P<dropped>{'|'.join(map(regex.escape, dropped))})")
        self._pattern = regex.compile("|".join(parts))

    def at(self, text: str, offset: int) -> Tag | None:
        """The tag at `offset`; None if there is none, whatever may follow."""
        found = self._pattern.match(text, offset, partial=True)
        # A longer one is no tag, however it is cut: what could still become one is held back, and looked at again.
        if found is None or found.end() - offset > LONGEST_TAG - found.partial:
            return None
        if found.partial:
            return Tag("", found.end())
        groups = found.groupdict()
        return Tag(
            found.lastgroup,
            found.end(),
            groups.get("invoke_name") or groups.get("parameter_name") or "",
            groups.get("string"),
            groups.get("spelling") or "",
        )


def closing(spelling: str) -> str:
    """The closing tag of a parameter whose opening tag was spelt so."""
    return f"</{DSML}{spelling}parameter>"


def held_back(text: str, offset: int, tag: str) -> int:
    """Where the longest end of `text` begins that may grow into `tag`; len(text) if there is none.

    `tag` has its first character nowhere else.
    """
    start = text.rfind(tag[0], max(offset, len(text) - len(tag) + 1))
    return start if start >= 0 and tag.startswith(text[start:]) else len(text)
