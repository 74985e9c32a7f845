# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny random DeepSeek-V4.1 in the layout of the release.

Names, dtypes, packing, nesting of config.json and the cut into shards are the release's; only the sizes and
the values are ours. See `tiny_config.PRESETS` for what there is.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import shutil
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Iterator

from safetensors.torch import save

from .. import tensor_table
from ..errors import CheckpointError
from . import tiny_config, tiny_tokenizer, tiny_weights, token_classes

STAMP = "tiny_checkpoint.json"
_SOURCES = (tensor_table, tiny_config, tiny_tokenizer, tiny_weights, token_classes)


def write(path: str | os.PathLike, preset: str, seed: int = 0, **overrides) -> Path:
    """Write the checkpoint `preset` into the folder `path`; at once where the same one is there already.

    The folder appears whole or not at all: it is made beside its place and renamed. An older tiny checkpoint
    at `path` is replaced. Two writers of one path wait for each other. The same arguments give the same bytes.

    Args:
        path: folder to make, with its parents.
        preset: a key of `tiny_config.PRESETS`.
        seed: of the weights; the tokenizer and config.json do not depend on it.
        overrides: keys of `text_config`, or attributes of `tiny_config.Recipe`.

    Returns:
        The absolute path.

    Raises:
        UsageError: no such preset or setting.
        CheckpointError: `path` is something else's, the disk is full, or the folder cannot be written.
    """
    path = Path(os.path.abspath(path))
    recipe = tiny_config.resolve(preset, overrides)
    wanted = {"preset": preset, "seed": seed, "recipe": asdict(recipe), "version": _version()}
    if _is_written(path, wanted):
        return path
    partial, replaced = (path.with_name(f".{path.name}.{state}") for state in ("partial", "replaced"))
    try:
        with _locked(partial):
            try:
                if _is_written(path, wanted):  # another writer was first
                    shutil.rmtree(partial)
                    return path
                _refuse_foreign(path)
                _fill(partial, recipe, seed)
                sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
                _write_json(partial / STAMP, wanted | {"files": sizes})
                shutil.rmtree(replaced, ignore_errors=True)
                if path.exists():
                    path.rename(replaced)
                partial.rename(path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        hint = "free some space, or choose another folder" if error.errno == errno.ENOSPC else "choose another folder"
        raise CheckpointError(f"cannot write the tiny checkpoint {path}: {error.strerror}", hint) from None
    return path


def _version() -> str:
    """Changes with the code that decides the bytes."""
    return hashlib.sha256(b"".join(Path(module.__file__).read_bytes() for module in _SOURCES)).hexdigest()


def _is_written(path: Path, wanted: dict) -> bool:
    try:
        stamp = json.loads((path / STAMP).read_text())
        sizes = stamp.pop("files")
        return stamp == json.loads(json.dumps(wanted)) and all((path / n).stat().st_size == s for n, s in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _refuse_foreign(path: Path) -> None:
    if path.exists() and not (path / STAMP).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} is not a tiny checkpoint of ours: it is left alone", "choose another folder")


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold `partial` as an empty folder; the lock ends with the process, so a leftover is taken over."""
    handle = _acquire(partial)
    try:
        for leftover in partial.iterdir():
            leftover.unlink()
        yield
    finally:
        os.close(handle)


def _acquire(partial: Path) -> int:
    """A locked descriptor of the folder that bears this name now: a holder renames or removes it at the end."""
    while True:
        with suppress(FileExistsError):
            partial.mkdir(parents=True)
        with suppress(FileNotFoundError), ExitStack() as undo:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
            undo.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(handle), os.stat(partial)):
                undo.pop_all()
                return handle


def describe(folder: Path, recipe: tiny_config.Recipe) -> dict:
    """Write everything but the weights, config and tokenizer, and return config.json's content."""
    tokenizer = tiny_tokenizer.deepseek() if recipe.own_tokenizer else tiny_tokenizer.tiny()
    config = tiny_config.build_config(recipe, max(token_classes.token_classes(tokenizer)) + 1)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    limit = config["text_config"]["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", tiny_tokenizer.tokenizer_config(limit))
    return config


def _fill(folder: Path, recipe: tiny_config.Recipe, seed: int) -> None:
    config = describe(folder, recipe)
    specs = list(tensor_table.expected_tensors(config))
    weights = tiny_weights.TinyWeights(recipe, specs, seed)
    by_shard = itertools.groupby(specs, key=lambda spec: tensor_table.shard_key(spec.name))
    shards = [[spec.name for spec in group] for _, group in by_shard]
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors |= weights.make(name)
        (folder / file).write_bytes(save(tensors, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(names, file)
    total = sum(spec.nbytes for spec in specs)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
