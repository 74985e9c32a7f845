# SPDX-License-Identifier: Apache-2.0
"""Weights of the reference decoder: by name and shape, from a checkpoint, or random (model_spec sections 7 and 11).

Everything becomes float32 except the engram tables, which stay as stored (E4M3 codes and E8M0 scales) and
are decoded row by row: at full size float32 tables would take 733 GiB.
"""

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..model_spec import ModelSpec
from ..tensor_table import text_tensors

Tensor = torch.Tensor
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DAMAGED = "the file is damaged: download it again"
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model and the draft, by released name, with its shape once decoded.

    Scales of decoded weights and the vision tower are not in it; scales of engram tables are.
    """
    shapes = {}
    for tensor in text_tensors(spec):
        if tensor.dtype != "F8_E8M0" or tensor.name.endswith("engram.embed.scale"):
            rows, *inner = tensor.shape
            shapes[tensor.name] = (rows, 2 * inner[0]) if tensor.dtype == "I8" else tensor.shape
    return shapes


def load_weights(path: str | Path, spec: ModelSpec) -> dict[str, Tensor]:
    """Read a checkpoint folder in the released layout, from its shards or from one file.

    Returns:
        The tensors of `tensor_shapes`: float32, engram tables float8_e4m3fn with float8_e8m0fnu scales.

    Raises:
        CheckpointError: a shard or tensor is missing, unreadable, or of another shape.
    """
    folder = Path(path)
    shard_of = _shards(folder)
    files: dict[str, safe_open] = {}

    def read(name: str) -> Tensor:
        if name not in shard_of:
            raise CheckpointError(f"{folder} has no tensor {name}", "the checkpoint is incomplete or of another size")
        shard = shard_of[name]
        try:
            if shard not in files:
                files[shard] = safe_open(folder / shard, "pt")
            return files[shard].get_tensor(name)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} lacks the shard {shard}", "download it again") from None
        except SafetensorError as error:
            raise CheckpointError(f"{shard} cannot be read: {error}", _DAMAGED) from None

    weights = {}
    for name, shape in tensor_shapes(spec).items():
        stored = read(name)
        if ".engram.embed." not in name:
            if stored.dtype in (torch.float8_e4m3fn, torch.int8):
                stored = decode(stored, read(name.removesuffix("weight") + "scale"))
            stored = stored.float()
        if stored.shape != shape:
            raise CheckpointError(f"{name} is {list(stored.shape)}, config.json says {list(shape)}",
                                  "config.json belongs to another checkpoint")
        weights[name] = stored
    return weights


def _shards(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        if (folder / INDEX_FILE).exists():
            return json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        with safe_open(folder / SINGLE_FILE, "pt") as single:
            return dict.fromkeys(single.keys(), SINGLE_FILE)
    except FileNotFoundError:
        missing = f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}"
        raise CheckpointError(missing, "give a checkpoint folder") from None
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: {error}", _DAMAGED) from None


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 [N, K] of E4M3 codes [N, K] with a scale per 32x32 tile, or of two E2M1 codes a byte
    [N, K/2] (even k in the low nibble) with a scale per row and 32 of K. Scales are E8M0."""
    scale = scale.float().repeat_interleave(32, 1)
    if codes.dtype == torch.int8:
        pairs = codes.view(torch.uint8).int()
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
        values = torch.where(nibbles > 7, -1.0, 1.0) * _E2M1[nibbles & 7]
    else:
        values = codes.float()
        scale = scale.repeat_interleave(32, 0)[: len(codes)]
    return values * scale[:, : values.shape[1]]


def random_weights(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Random tensors under which every parameter matters: norms near 1, sinks, biases and mixes spread out."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(spec).items():
        if name.endswith("engram.embed.scale"):
            weights[name] = torch.randint(120, 123, shape, generator=generator).byte().view(torch.float8_e8m0fnu)
            continue
        x = torch.randn(shape, generator=generator)
        if name.endswith("engram.embed.weight"):
            weights[name] = (50 * x).clamp(-448, 448).to(torch.float8_e4m3fn)
        elif name.endswith(("norm.weight", "_scale", "q_weight", "k_weight")):
            weights[name] = 1 + 0.1 * x
        elif len(shape) == 1:
            weights[name] = 0.3 * x
        elif name == "embed.weight":
            weights[name] = x
        else:
            weights[name] = x * 1.2 / math.sqrt(shape[-1])
    return weights
