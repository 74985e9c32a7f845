# SPDX-License-Identifier: Apache-2.0
"""Mixed into the workers of `bench_topologies.py`: weights that do not depend on how the model is dealt out.

vLLM's dummy weights are drawn rank by rank, so that two layouts are two models. Here each tensor of the checkpoint is
drawn whole on the rank's device, from a stream of its own, and handed to the model's loader, which cuts out the rank's
share. vLLM imports this in every worker, before the weights are made.
"""

import json
import math
import zlib
from pathlib import Path

import torch
from vllm.model_executor.model_loader import dummy_loader

from benchmarks.bench_topologies import PRESET
from vllm.ampere.tensor_table import TILE, TensorSpec, expected_tensors
from vllm.ampere.testing import tiny_config
from vllm.ampere.testing.tiny_weights import TinyWeights, ue8m0

# What a code is worth on average: every E2M1 code as often as another, and E4M3 codes of a normal number times this.
_E2M1_RMS, _E4M3_RMS = 2.93, 64.0


class DrawnWeights(TinyWeights):
    """As `TinyWeights`, but drawn on a device, with one scale for all tiles of a matrix, and so fast enough for 552 B."""

    def __init__(self, recipe, specs, seed: int, device: torch.device):
        super().__init__(recipe, specs, seed)
        self._device = device

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))

    def _normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator(name), device=self._device)

    def _quantised(self, spec: TensorSpec) -> dict[str, torch.Tensor]:
        packed = spec.dtype == "I8"
        rows, inner = spec.shape[0], spec.shape[1] * (2 if packed else 1)
        if packed:
            codes = torch.empty(spec.shape, dtype=torch.uint8, device=self._device)
            codes = codes.random_(0, 256, generator=self._generator(spec.name)).view(torch.int8)
        else:
            codes = (self._normal(spec.name, *spec.shape) * _E4M3_RMS).to(torch.float8_e4m3fn)
        exponent = round(math.log2(self._gain(spec) / (_E2M1_RMS if packed else _E4M3_RMS) / math.sqrt(inner)))
        tiles = (rows if packed else -(-rows // TILE), -(-inner // TILE))
        scale = ue8m0(torch.full(tiles, exponent, device=self._device))
        return {spec.name: codes, spec.name.removesuffix("weight") + "scale": scale}


def load(loader, model: torch.nn.Module, model_config) -> None:
    """In place of `DummyModelLoader.load_weights`: every tensor that config.json implies, through the model's loader."""
    config = json.loads((Path(model_config.model) / "config.json").read_text())
    device = next(parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    specs = list(expected_tensors(config))
    drawn = DrawnWeights(tiny_config.PRESETS[PRESET], specs, 0, device)
    model.load_weights(item for spec in specs for item in drawn.make(spec.name).items())


dummy_loader.DummyModelLoader.load_weights = load


class Holder:
    """A method of a worker, called through `collective_rpc`."""

    def held_bytes(self) -> int:
        """Bytes of the model's parameters and buffers on the worker's device, shared ones once."""
        model = self.model_runner.model
        tensors = [t for t in (*model.parameters(), *model.buffers()) if t.device.type == self.device.type]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
