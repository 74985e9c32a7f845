# SPDX-License-Identifier: Apache-2.0
import pytest
from tokenizers import Regex, Tokenizer, normalizers

from vllm.ampere.testing import tiny_tokenizer
from vllm.ampere.testing.token_classes import normalise, token_classes

TOKENIZERS = {"tiny": tiny_tokenizer.tiny, "deepseek": tiny_tokenizer.deepseek}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request) -> Tokenizer:
    return TOKENIZERS[request.param]()


@pytest.mark.parametrize("text, want", [
    (" The", "the"), ("THE", "the"), ("\u00e9", "e"), ("e\u0301", "e"), ("\uff21", "a"), ("\u2460", "1"),
    (" ", " "), ("\n\n", " "), ("\t \r", " "), ("\u00a0", " "), (" a\t\nb ", "a b"), ("\u3000x\v", "x"),
    ("\u0301", ""), ("", ""), ("\v", ""), ("\x1c", "\x1c"), ("\ufb01", "fi"), ("\u03a3\u03a3", "\u03c3\u03c3"),
])
def test_normalise(text, want):
    assert normalise(text) == want


def test_classes_equal_a_rust_normaliser(tokenizer):
    """Against the normalisers of `tokenizers`, composed here by the specification."""
    lone = "\U000f0000"  # private use; no token holds it
    pipeline = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"\A \z"), lone),
        normalizers.Strip(), normalizers.Replace(lone, " "),
    ])
    keys = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        assert lone not in text
        # One name space: a raw token string may coincide with another token's text, and then they share a class.
        keys.append(tokenizer.id_to_token(token) if "\ufffd" in text else pipeline.normalize_str(text) or text)
    first = {key: i for i, key in reversed(list(enumerate(keys)))}
    order = {key: number for number, key in enumerate(sorted(first, key=first.get))}
    assert token_classes(tokenizer) == [order[key] for key in keys]


def test_class_counts():
    """99,092 is `engram_compressed_vocab_size` of the release; it stands although two markers are renamed."""
    assert max(token_classes(tiny_tokenizer.deepseek())) + 1 == 99_092
    classes = token_classes(tiny_tokenizer.tiny())
    assert len(classes) == 512
    assert max(classes) + 1 < 400, "hardly any tokens share a class, so the map is hardly tested"


@pytest.mark.vllm
def test_classes_equal_upstreams(tokenizer, tmp_path):
    """Id for id what vLLM hashes with, for the file as it loads it."""
    from transformers import PreTrainedTokenizerFast
    from vllm.models.deepseek_v41.common.engram import build_compressed_token_map

    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    token_map, count = build_compressed_token_map(loaded)
    assert list(token_map) == token_classes(tokenizer)
    assert count == max(token_classes(tokenizer)) + 1
