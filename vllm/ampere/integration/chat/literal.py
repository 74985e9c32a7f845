# SPDX-License-Identifier: Apache-2.0
"""Client text that spells control tokens, kept from becoming them.

The prompt is written as one text and then tokenised, so that a message which spells `<｜Assistant｜>` would open a
turn. Here every spelling in client text gets a mark inside, and the prompt is cut at the marks before it is tokenised:
the model reads the client's text, letter for letter, in tokens of plain text. The tags of a tool result are plain
text in the format itself; in a user turn they are escaped.
"""

import re

# Half of a surrogate pair, which no text has.
_MARK = "\udfff"
# All spellings begin so: `<｜User｜>`, `<|EOT|>`, `</think>`, `<dsml:`, `｜DSML｜`. More than the tokenizer has is fine.
_SPELLING = re.compile(r"<(?=[｜|]|/?think>|/?dsml:)|｜(?=DSML｜)")
_RESULT_TAG = re.compile("<(?=/?tool_result>)")


def mark(value):
    """`value`, text or JSON, with a mark in everything that spells a control token.

    Raises:
        ValueError: a text holds half of a surrogate pair.
    """
    if isinstance(value, str):
        check(value)
        return _SPELLING.sub(rf"\g<0>{_MARK}", value)
    if isinstance(value, dict):
        return {mark(name): mark(inner) for name, inner in value.items()}
    return [mark(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def check(text: str) -> None:
    """Raises ValueError if `text` cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            r"a text holds half of a surrogate pair (\ud800 to \udfff), which stands for no character"
        ) from None


def escape_results(text: str) -> str:
    """`text` of a user turn without the tags that enclose a tool result there."""
    return _RESULT_TAG.sub("&lt;", text)


def tokens(encode, prompt: str) -> list[int]:
    """Token ids of a prompt, marked or not; `encode` tokenises a text without adding to it."""
    return [token for piece in prompt.split(_MARK) for token in encode(piece)]


def is_marked(prompt: str) -> bool:
    """Whether a prompt has to be tokenised by `tokens`."""
    return _MARK in prompt
