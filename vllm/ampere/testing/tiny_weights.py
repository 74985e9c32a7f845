# SPDX-License-Identifier: Apache-2.0
"""Random tensors of a tiny checkpoint, each from a stream of its own.

A tensor depends on the seed and its name only, so shards are made one at a time in any order, and a change
to one tensor leaves the others as they were. Values come from NumPy's Philox generator, and quantisation
divides by powers of two, found from exponents: the same bytes on every machine.
"""

import hashlib
import math

import numpy as np
import torch

from ..tensor_table import TILE, TensorSpec
from .tiny_config import Recipe

E4M3_MAX, E2M1_MAX = 448.0, 6.0
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_GAIN = 1.2
_TILE_SIZES = np.array([-1, 0, 1])  # powers of two
_TILE_VARIANCE = (4.0**_TILE_SIZES).mean()
# Another series is another set of checkpoints: the bounds that tests hold were measured on this one.
_SERIES = 0
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
# What a block adds to the residual stream comes out of these projections.
_OUTPUTS = ("attn.wo_b.weight", ".w2.weight", "engram.wkv.weight")


class TinyWeights:
    """Makes the tensors of one checkpoint.

    Args:
        recipe: spreads and gains.
        specs: every tensor of the checkpoint.
        seed: any integer.
    """

    def __init__(self, recipe: Recipe, specs: list[TensorSpec], seed: int):
        self.recipe = recipe
        self.specs = {spec.name: spec for spec in specs}
        self.seed = seed

    def make(self, name: str) -> dict[str, torch.Tensor]:
        """A tensor in its stored dtype, with its scales where it has any; empty for the scales themselves."""
        spec = self.specs[name]
        if spec.dtype == "F8_E8M0":
            return {}
        if name.endswith("engram.embed.weight"):
            return self._engram_table(spec)
        if spec.dtype in ("F8_E4M3", "I8"):
            return self._quantised(spec)
        value = self._markov_head(name) if self._agrees(name) else self._plain(spec)
        return {name: value.to(_DTYPES[spec.dtype])}

    def _stream(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{_SERIES}/{self.seed}/{name}".encode()).digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16])))

    def _normal(self, name: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self._stream(name).standard_normal(shape, dtype=np.float32))

    def _plain(self, spec: TensorSpec) -> torch.Tensor:
        normal, name = self._normal(spec.name, *spec.shape), spec.name
        if name.endswith(("hc_attn_scale", "hc_ffn_scale", "q_weight", "k_weight")) or "norm" in name:
            return 1 + 0.1 * normal
        if name.endswith(("hc_attn_base", "hc_ffn_base")):
            return 0.3 * normal
        if name.endswith("attn_sink"):
            return 0.5 * normal
        if ".gate.bias" in name:
            return self.recipe.routing_bias_std * normal
        if name.endswith(".bias"):
            return 0.1 * normal
        if name == "embed.weight" or len(spec.shape) == 1:
            return normal
        # Log-probabilities of unit spread: the bounds of the comparisons are in these units.
        gain = 1.0 if name == "head.weight" else _GAIN
        return normal * (gain / math.sqrt(spec.shape[-1]))

    def _agrees(self, name: str) -> bool:
        return self.recipe.drafts_agree and ".markov_head." in name

    def _markov_head(self, name: str) -> torch.Tensor:
        """25 times the logits that the target's embedding, last norm and head give for the last token alone."""
        if name.endswith(".head.weight"):
            return 5 * self._stored("head.weight")
        embed = self._stored("embed.weight")
        return 5 * embed * torch.rsqrt(embed.square().mean(-1, keepdim=True)) * self._stored("norm.weight")

    def _stored(self, name: str) -> torch.Tensor:
        return self.make(name)[name].float()

    def _quantised(self, spec: TensorSpec) -> dict[str, torch.Tensor]:
        """E4M3 with a scale a 32x32 tile, or two E2M1 codes a byte with a scale a row and 32 inputs."""
        packed = spec.dtype == "I8"
        rows, inner = spec.shape[0], spec.shape[1] * (2 if packed else 1)
        normal = self._normal(spec.name, rows, inner) * (self._gain(spec) / math.sqrt(inner * _TILE_VARIANCE))
        high = 1 if packed else TILE
        padded = torch.nn.functional.pad(normal, (0, -inner % TILE, 0, -rows % high))
        tiles = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, high))
        # Neighbouring tiles differ in size, so that a scale read from the wrong place shows.
        size = self._stream(f"{spec.name}/size").choice(_TILE_SIZES, (tiles.shape[0], tiles.shape[2]))
        tiles = torch.ldexp(tiles, torch.from_numpy(size)[:, None, :, None])
        exponent = _exponent(tiles.abs().amax((1, 3)), E2M1_MAX if packed else E4M3_MAX)
        codes = torch.ldexp(tiles, -exponent[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :inner]
        stored = _pack_e2m1(codes) if packed else codes.to(torch.float8_e4m3fn)
        return {spec.name: stored.contiguous(), spec.name.removesuffix("weight") + "scale": ue8m0(exponent)}

    def _gain(self, spec: TensorSpec) -> float:
        """Of a quantised matrix, relative to 1 / sqrt(inputs)."""
        return self.recipe.block_gain if spec.name.endswith(_OUTPUTS) else _GAIN

    def _engram_table(self, spec: TensorSpec) -> dict[str, torch.Tensor]:
        scale = self.specs[spec.name.removesuffix("weight") + "scale"]
        codes = (50 * self._normal(spec.name, *spec.shape)).clamp(-E4M3_MAX, E4M3_MAX)
        exponent = torch.from_numpy(self._stream(scale.name).integers(-7, -4, scale.shape))
        return {spec.name: codes.to(torch.float8_e4m3fn), scale.name: ue8m0(exponent)}


def _exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The least e with amax <= largest * 2^e, for powers of two from exponents alone; 0 for an empty tile."""
    mantissa, exponent = torch.frexp(amax / largest)
    return torch.where(amax > 0, exponent - (mantissa == 0.5).int(), 0)


def ue8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Powers of two as UE8M0 bytes."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest E2M1 codes of values in [-6, 6], the even column in the low half of each byte."""
    magnitude = torch.bucketize(values.abs().contiguous(), torch.tensor(_E2M1_MIDPOINTS))
    codes = (magnitude + 8 * (values < 0)).to(torch.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
