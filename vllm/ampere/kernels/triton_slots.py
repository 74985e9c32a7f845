# SPDX-License-Identifier: Apache-2.0
"""Device functions that the kernels over slots, rows and requests share."""

from .launch import tl, triton


@triton.jit
def page_slots(table_ptr, rows, counts, page_rows):
    """int32 slots of a request's rows by its row of the block table; -1 where an entry does not count."""
    rows = tl.where(counts, rows, 0)
    page = tl.load(table_ptr + rows // page_rows, mask=counts, other=0)
    return tl.where(counts, page * page_rows + rows % page_rows, -1).to(tl.int32)


@triton.jit
def request_of(token, query_start_ptr, requests, origin, BLOCK_R: tl.constexpr):
    """int32: how many requests end at or before a token, when `query_start` counts from `origin`.

    That is the token's request, or `requests` for a token after the last.
    """
    ended = 0
    for first in range(0, requests, BLOCK_R):
        offs = first + tl.arange(0, BLOCK_R)
        end = tl.load(query_start_ptr + 1 + offs, mask=offs < requests, other=0) - origin
        ended += tl.sum(((offs < requests) & (end <= token)).to(tl.int32), 0)
    return ended
