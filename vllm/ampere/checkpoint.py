# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint folder from its headers alone, and says in one line what is wrong with it.

No weight is read and torch is not imported: config.json, the index, the header of every shard, and the
tokenizer's classes where `tokenizers` is installed. The released checkpoint (96,085 tensors in 48 shards,
475 GiB) takes seconds.
"""

import importlib.util
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointError
from .model_spec import ModelSpec
from .tensor_table import DTYPE_BYTES, TensorSpec, expected_tensors

# What `inspect` reads, in this order; it stops at the first fault.
PARTS = ("config", "shards", "headers", "tensors", "tokenizer")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The safetensors format refuses longer headers.
_HEADER_LIMIT_BYTES = 100_000_000
_DOWNLOAD = "download this file again; an interrupted download can be resumed"
_MODIFIED = "use an unmodified DeepSeek-V4.1 checkpoint: its config.json and its shards must come from one release"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        spec: name, dtype and shape.
        file: name of its shard.
        offset_bytes: where its bytes start in that file.
    """

    spec: TensorSpec
    file: str
    offset_bytes: int


@dataclass(frozen=True)
class CheckpointReport:
    """A checkpoint that can be loaded.

    Attributes:
        path: its folder.
        spec: the model's dimensions.
        tensors: every tensor by name.
        tensor_bytes: bytes of all tensors, without headers.
        classes_checked: the tokenizer's classes were counted; False where the model has no engram or the
            package `tokenizers` is missing.
    """

    path: Path
    spec: ModelSpec
    tensors: dict[str, StoredTensor]
    tensor_bytes: int
    classes_checked: bool


def inspect(path: str | os.PathLike) -> CheckpointReport:
    """Check that a folder holds a complete DeepSeek-V4.1 in the released layout.

    Args:
        path: the folder with config.json.

    Raises:
        CheckpointError: one line that names the folder and the first thing wrong: no such folder, another
            model, contradicting numbers, a missing, truncated or garbled shard, a tensor that is missing, of
            the wrong dtype or shape or out of place, a missing tokenizer or one of another class count. Its
            `part` says which of `PARTS` that was.
    """
    folder = Path(path)
    part = "config"
    try:
        config = _config(folder)
        spec = ModelSpec.from_config(config)
        part = "shards"
        index, files = _shards(folder)
        part = "headers"
        tensors = _tensors(folder, index, files)
        part = "tensors"
        _compare(tensors, config)
        part = "tokenizer"
        checked = _check_tokenizer(folder, spec)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}", error.hint, part) from None
    except OSError as error:
        message = f"{folder}: cannot read {error.filename}: {error.strerror}"
        raise CheckpointError(message, "check its permissions", part) from None
    return CheckpointReport(folder, spec, tensors, sum(t.spec.nbytes for t in tensors.values()), checked)


def _fail(message: str, hint: str) -> NoReturn:
    raise CheckpointError(message, hint)


def _config(folder: Path) -> dict[str, Any]:
    hint = "give the folder that holds config.json and the *.safetensors files"
    if not folder.exists():
        _fail("there is no such folder", hint)
    if not folder.is_dir():
        _fail("this is a file, not a checkpoint folder", hint)
    if not any(folder.iterdir()):
        _fail("the folder is empty", hint)
    if not (folder / "config.json").is_file():
        _fail("the folder has no config.json", hint)
    return _json_object(folder / "config.json")


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        _fail(f"{file.name} is not a JSON object", _DOWNLOAD)
    return content


def _shards(folder: Path) -> tuple[dict[str, str], list[str]]:
    """The index, tensor to shard, and the shards that it names; or no index and the only shard."""
    index: dict[str, str] = {}
    files = [SINGLE]
    if (folder / INDEX).is_file():
        index = _json_object(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or not all(isinstance(file, str) for file in index.values()):
            _fail(f"{INDEX} has no weight_map", _DOWNLOAD)
        files = sorted(set(index.values()))
    elif not (folder / SINGLE).is_file():
        _fail(f"the folder has no {INDEX}", "download the whole checkpoint: the index names its shards")
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _fail(f"shard {missing[0]}{more} of {len(files)} is missing", "download the missing shards")
    return index, files


def _tensors(folder: Path, index: dict[str, str], files: list[str]) -> dict[str, StoredTensor]:
    """Every tensor of the shards."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _header(folder / file):
            other = tensors.setdefault(tensor.spec.name, tensor)
            if other is not tensor:
                _fail(f"tensor {tensor.spec.name} is both in {other.file} and in {file}", _MODIFIED)
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            _fail(f"the index names tensor {name} in {file}, which does not hold it", _MODIFIED)
    return tensors


def _header(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file: 8 bytes with the header's length, a JSON header, the values end to end."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        prefix = handle.read(8)
        if prefix == b"version ":
            _fail(f"{file.name} is a Git LFS pointer, not the shard itself", "run `git lfs pull`")
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length <= _HEADER_LIMIT_BYTES and 8 + length > size:
            _fail(f"{file.name} is truncated: its {size} bytes end inside the header", _DOWNLOAD)
        raw = handle.read(length) if length <= _HEADER_LIMIT_BYTES else b""
    try:
        entries = [
            (begin, end, TensorSpec(name, entry["dtype"], tuple(entry["shape"])))
            for name, entry in json.loads(raw).items() if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        ]
        entries.sort(key=lambda entry: entry[:2])
        ends = [0, *(end for _, end, _ in entries)]
        sound = all(begin == last and end - begin == spec.nbytes for (begin, end, spec), last in zip(entries, ends))
    except (ValueError, TypeError, KeyError, AttributeError):
        sound = False
    if not sound:
        _fail(f"{file.name} has no valid safetensors header", _DOWNLOAD)
    data, excess = 8 + length, size - (8 + length + ends[-1])
    if excess < 0:
        _fail(f"{file.name} is truncated: {-excess} of its {data + ends[-1]} bytes are missing", _DOWNLOAD)
    if excess > 0:
        _fail(f"{file.name} is {excess} bytes longer than its header says", _DOWNLOAD)
    return [StoredTensor(spec, file.name, data + begin) for begin, _, spec in entries]


def _compare(tensors: dict[str, StoredTensor], config: dict[str, Any]) -> None:
    unknown = dict(tensors)
    for want in expected_tensors(config):
        found = unknown.pop(want.name, None)
        if found is None:
            _fail(f"tensor {want.name} is missing", _MODIFIED)
        if found.spec != want:
            _fail(f"tensor {want.name} in {found.file} is {found.spec.dtype} {list(found.spec.shape)}, "
                  f"must be {want.dtype} {list(want.shape)}", _MODIFIED)
    for name, tensor in unknown.items():
        _fail(f"tensor {name} in {tensor.file} is not one of a DeepSeek-V4.1 with this config.json", _MODIFIED)


def _check_tokenizer(folder: Path, spec: ModelSpec) -> bool:
    file = folder / "tokenizer.json"
    if not file.is_file():
        _fail("the folder has no tokenizer.json", "download it: the engram's hash is made from the tokenizer")
    if not spec.engram_layer_ids or importlib.util.find_spec("tokenizers") is None:
        return False
    from tokenizers import Tokenizer

    from .testing.token_classes import token_classes

    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # the package raises bare Exception
        _fail(f"tokenizer.json cannot be read: {str(error).splitlines()[0]}", _DOWNLOAD)
    classes = max(token_classes(tokenizer), default=-1) + 1
    if classes != spec.engram_compressed_vocab_size:
        _fail(f"the tokenizer has {classes} token classes, config.json says {spec.engram_compressed_vocab_size} "
              "(engram_compressed_vocab_size)", "use the tokenizer.json that came with the checkpoint")
    return True
