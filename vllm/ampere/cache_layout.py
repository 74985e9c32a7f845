# SPDX-License-Identifier: Apache-2.0
"""Byte layouts of the three stored formats, named once (model_spec section 12).

A page holds `tokens` rows of one cache. All values of the page come first, then all scales:

    KV page     [token 0 data 576 | token 1 data | ...][token 0 scales 8 | token 1 scales | ...][padding]
    index page  [token 0 codes 128 | token 1 codes | ...][token 0 scale 4 | ...][padding]

Pages are views into packed blocks: the distance between two pages is `stride(0)` of the cache tensor,
never tokens * bytes, and every address is 64 bits wide.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLayout:
    """Layout of a page whose rows split into a data part and a scale part.

    Attributes:
        data_bytes: bytes of one row's values.
        scale_bytes: bytes of one row's scales, stored after the values of all rows.
    """

    data_bytes: int
    scale_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, values and scales together."""
        return self.data_bytes + self.scale_bytes

    def data_offset(self, row):
        """Byte offset in the page of a row's values; `row` is an int or an integer tensor."""
        return row * self.data_bytes

    def scale_offset(self, row, page_rows: int):
        """Byte offset in the page of a row's scales, for pages of `page_rows` rows."""
        return page_rows * self.data_bytes + row * self.scale_bytes


# One latent row of 512: 448 E4M3 codes, 64 bfloat16 rotated dims; 7 UE8M0 bytes and one zero byte.
HEAD_DIM = 512
ROPE_DIM = 64
NOPE_DIM = HEAD_DIM - ROPE_DIM
# The indexer scores a step in slices of this size, at any context length.
SCORE_BUDGET_BYTES = 512 << 20
# Drafts are made past the end of a context.
_SPARE_POSITIONS = 1024
KV_GROUP = 64
KV_GROUPS = NOPE_DIM // KV_GROUP
KV_RECORD = PageLayout(data_bytes=NOPE_DIM + 2 * ROPE_DIM, scale_bytes=KV_GROUPS + 1)

# One index key: 128 E4M3 codes and one float32 power-of-two scale.
INDEX_DIM = 128
INDEX_KEY = PageLayout(data_bytes=INDEX_DIM, scale_bytes=4)

# One engram row: 256 E4M3 codes in the table, 8 UE8M0 bytes in a table of their own.
ENGRAM_DIM = 256
ENGRAM_GROUP = 32
ENGRAM_SCALES = ENGRAM_DIM // ENGRAM_GROUP

# Quantiser constants shared by the writers of both caches.
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4


def rotary_rows(context: int, batched_tokens: int) -> int:
    """Rows of a rotary table on a card: positions of the longest context, or of a step made up to warm up."""
    return max(context, batched_tokens) + _SPARE_POSITIONS
