# SPDX-License-Identifier: Apache-2.0
"""KV bytes of a token, blocks of a stage, and the tokens that they hold, as vLLM 0.33.0 packs them.

One pool of blocks serves every cache. A block holds one page of each layer of one group: the compressed caches
and index keys of all sources are one group (128 tokens a page), window caches are dealt out over as many groups
as fit under its width (32 tokens a page), compressor rings are one more (one block a request). Block numbers are
shared over all stages; a stage's block is as wide as its widest share of a group (relay_design section 3). A stage
behind a relayed cut has a copy of the source's caches: pages of the same group, with the same numbers.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

from ..cache_layout import HEAD_DIM, INDEX_KEY, KV_RECORD
from ..model_spec import Layer, ModelSpec
from .pipeline import Stage, copied_source

BLOCK_TOKENS = 128
WINDOW_TOKENS = 32
# Pages are padded to whole data parts of a record.
_ALIGNMENT_BYTES = KV_RECORD.data_bytes
_RING_MIN_TOKENS = 8
_RING_TOKEN_BYTES = 2 * HEAD_DIM * 4


def token_bytes(spec: ModelSpec, stage: Stage) -> float:
    """Record and index-key bytes of a token in a stage's compressed caches, copies included, without padding."""
    return sum(
        (KV_RECORD.row_bytes + INDEX_KEY.row_bytes * keys) / layer.ratio for layer, keys in _held_sources(spec, stage)
    )


@dataclass(frozen=True)
class KvBlocks:
    """The groups of a model, and each stage's share of them.

    Attributes:
        spec: the model's dimensions.
        draft_tokens: tokens that DSpark proposes a step; 0 leaves its layers out.
        in_flight_tokens: most tokens that are scheduled and not yet settled; window pages of these are held.
    """

    spec: ModelSpec
    draft_tokens: int
    in_flight_tokens: int

    @cached_property
    def window_groups(self) -> int:
        """Groups that the window caches are dealt out over."""
        window_layers = self.spec.num_hidden_layers + self._draft_layers
        if not self._sources:
            return 1
        pages = Counter(page for layer in self._sources for page in _source_pages(layer, True))
        if len(pages) > 1 and len(set(pages.values())) == 1:
            # One page of each size a source: a pattern that repeats once a source.
            members = [len(self._sources), window_layers] + [len(self._rings)] * bool(self._rings)
            return -(-window_layers // _closest_divisor(members, len(self._sources)))
        widest = max(sum(page * count for page, count in pages.items()), _window_page(), self._ring_page)
        return -(-window_layers // (widest // _window_page()))

    def block_bytes(self, stage: Stage) -> int:
        """Bytes of one block in the pool of each rank of a stage."""
        windows: Sequence[int] = range(self.spec.num_hidden_layers + self._draft_layers)
        held = [layer for layer in windows if stage.holds(layer) or stage.last and layer >= stage.end]
        shares = Counter(layer % self.window_groups for layer in held)
        return max(
            max(shares.values()) * _window_page(),
            sum(sum(_source_pages(*held)) for held in _held_sources(self.spec, stage)),
            sum(stage.holds(layer.index) for layer in self._rings) * self._ring_page,
        )

    def request_blocks(self, context: int) -> int:
        """Blocks that a request of `context` tokens may hold at once, which is what vLLM admits by."""
        window = min(self.spec.sliding_window - 1 + self.in_flight_tokens, context)
        compressed = -(-context // BLOCK_TOKENS) if self._sources else 0
        return compressed + self.window_groups * (-(-window // WINDOW_TOKENS) + 1) + bool(self._rings)

    def concurrency(self, blocks: int, context: int) -> float:
        """Requests of `context` tokens that `blocks` blocks hold at once; vLLM prints it at start-up."""
        return blocks / self.request_blocks(context)

    def capacity_tokens(self, blocks: int, context: int) -> int:
        """The number that vLLM prints as the size of its KV cache: concurrency times context."""
        return int(self.concurrency(blocks, context) * context)

    def longest_context(self, blocks: int) -> int:
        """Longest single request that `blocks` blocks hold, in tokens; 0 if none fits."""
        low, high = 0, self.spec.max_position_embeddings
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.request_blocks(middle) <= blocks else (low, middle - 1)
        return low

    @cached_property
    def _sources(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.spec.layers if layer.owns_kv)

    @cached_property
    def _rings(self) -> tuple[Layer, ...]:
        """Sources that pool several tokens into a row keep the open ones in a ring."""
        return tuple(layer for layer in self._sources if layer.ratio > 1)

    @property
    def _ring_page(self) -> int:
        tokens = max(_RING_MIN_TOKENS, 1 << (self.draft_tokens + 1).bit_length())
        return tokens * _RING_TOKEN_BYTES if self._rings else 0

    @property
    def _draft_layers(self) -> int:
        return self.spec.num_nextn_predict_layers if self.draft_tokens else 0


def _held_sources(spec: ModelSpec, stage: Stage) -> list[tuple[Layer, bool]]:
    """Sources of whose caches a stage has one, its own or a copy; and whether index keys are among them."""
    copied = copied_source(spec, stage)
    own = [(layer, True) for layer in spec.layers[stage.start : stage.end] if layer.owns_kv]
    return [(spec.layers[copied[0]], copied[1]), *own] if copied else own


def _source_pages(layer: Layer, keys: bool) -> tuple[int, int]:
    """Bytes of a source's page of records and of its page of index keys, 0 without these."""
    rows = BLOCK_TOKENS // layer.ratio
    return _padded(rows * KV_RECORD.row_bytes), _padded(rows * INDEX_KEY.row_bytes) * keys


def _window_page() -> int:
    return _padded(WINDOW_TOKENS * KV_RECORD.row_bytes)


def _padded(page: int) -> int:
    return -(-page // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _closest_divisor(values: Sequence[int], least: int) -> int:
    """The number from `least` up that the values, rounded up to its multiples, grow least by; the largest such."""
    return min(range(least, max(values) + 1), key=lambda d: (sum(-value % d for value in values), -d))
