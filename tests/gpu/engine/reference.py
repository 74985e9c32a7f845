# SPDX-License-Identifier: Apache-2.0
"""The reference decoder on the card."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.testing.reference_decoder import ReferenceDecoder
from vllm.ampere.testing.reference_rounding import ENGINE
from vllm.ampere.testing.reference_weights import load_weights
from vllm.ampere.testing.token_classes import token_classes


@cache
def _parts(checkpoint: Path) -> tuple:
    spec = ModelSpec.from_config(json.loads((checkpoint / "config.json").read_text()))
    classes = token_classes(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    return spec, {key: value.cuda() for key, value in load_weights(checkpoint, spec).items()}, classes


def decoder_of(checkpoint: Path) -> ReferenceDecoder:
    """A decoder of its own, with the engine's roundings; weights are loaded once."""
    return ReferenceDecoder(*_parts(checkpoint), ENGINE)
