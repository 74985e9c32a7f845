# SPDX-License-Identifier: Apache-2.0
"""The normalised token classes over which the engram hashes its n-grams (model_spec section 8).

" The", "the" and "THE" hash alike: each token is mapped to the class of its normalised text. The number
of classes also fixes the hash multipliers, so it must equal `engram_compressed_vocab_size` exactly.
"""

import re
import unicodedata

# Unicode's White_Space property; str.strip() would also take the separators 0x1c-0x1f.
_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))


def normalise(text: str) -> str:
    """The text whose class a token belongs to; empty where nothing is left of it."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # Letter by letter: str.lower() of the whole would pick the Greek final sigma by its neighbours.
    text = "".join(c.lower() for c in text if not unicodedata.category(c).startswith("M"))
    text = re.sub(r"[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip(_SPACE)


def token_classes(tokenizer) -> list[int]:
    """The class of every token id.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.

    Returns:
        A list indexed by token id; classes are numbered from 0 in the order of their first token. The
        number of classes is the maximum plus one.
    """
    ids = range(tokenizer.get_vocab_size(with_added_tokens=True))
    numbers: dict[str, int] = {}
    classes = []
    for token, text in zip(ids, tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)):
        # Part of a UTF-8 sequence: nothing to normalise, the raw token is its own class.
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalise(text) or text
        classes.append(numbers.setdefault(key, len(numbers)))
    return classes
