# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders with true headers and holes for the values: the released sizes in a few megabytes of disk."""

import json
from itertools import accumulate
from pathlib import Path

from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner.weights import RELEASED_VISION
from vllm.ampere.tensor_table import TensorSpec, expected_tensors


def write_hollow(folder: Path, spec: ModelSpec, tokenizer: str = "{}") -> list[TensorSpec]:
    """Write a one-shard checkpoint of these dimensions; returns its tensors.

    Args:
        folder: one that exists.
        spec: the dimensions.
        tokenizer: the text of tokenizer.json; its classes are counted where the model has an engram.
    """
    config = spec.to_config()
    config["vision_config"].update(RELEASED_VISION)
    tensors = list(expected_tensors(config))
    ends = list(accumulate(tensor.nbytes for tensor in tensors))
    header = json.dumps({
        tensor.name: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [end - tensor.nbytes, end]}
        for tensor, end in zip(tensors, ends)
    }).encode()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    return tensors
