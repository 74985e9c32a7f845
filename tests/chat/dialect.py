# SPDX-License-Identifier: Apache-2.0
"""A short notation for DSML, spelt for each version when a case runs. Written from the format, not from our reader.

    «calls» «/calls»     opens and closes a block of calls
    «f» «/f»             opens and closes a call of the tool f
    «a=» «n:»            opens the parameter a, a string, or n, JSON
    «/»                  closes a parameter
"""

import re

DSML = "｜DSML｜"
_BLOCK = {"v4": "tool_calls", "v41": " calls"}
_SPACE = {"v4": "", "v41": " "}


def spell(version: str, text: str) -> str:
    """`text` with its notation spelt as `version` ("v4" or "v41") writes it."""
    space = _SPACE[version]

    def tag(match: re.Match) -> str:
        word = match[1]
        if word in ("calls", "/calls"):
            return f"<{'/' * word.startswith('/')}{DSML}{_BLOCK[version]}>"
        if word == "/":
            return f"</{DSML}{space}parameter>"
        if word.startswith("/"):
            return f"</{DSML}{space}invoke>"
        if word.endswith(("=", ":")):
            string = "true" if word.endswith("=") else "false"
            return f'<{DSML}{space}parameter name="{word[:-1]}" string="{string}">'
        return f'<{DSML}{space}invoke name="{word}">'

    return re.sub("«([^»]*)»", tag, text)


def tool(name: str, **properties) -> dict:
    """A tool as a client sends it."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


STRING, INTEGER, OBJECT = {"type": "string"}, {"type": "integer"}, {"type": "object"}
TOOLS = (tool("f", a=STRING, n=INTEGER, o=OBJECT, u={"type": ["string", "null"]}), tool("g"))
