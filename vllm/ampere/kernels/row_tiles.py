# SPDX-License-Identifier: Apache-2.0
"""Row results that do not depend on how many rows there are, shared by the references.

BLAS picks another summation order for a few rows than for many, and vectorised functions round
their tails differently. Work in tiles of a fixed number of rows, padded with zeros, gives a token the
same bits alone and in any batch.
"""

import torch

ROWS = 16


def pad_rows(x: torch.Tensor, rows: int = ROWS) -> torch.Tensor:
    """`x` with zero rows after it, up to a multiple of `rows`."""
    short = -x.shape[0] % rows
    return torch.cat([x, x.new_zeros(short, *x.shape[1:])]) if short else x


def row_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, as products of exactly `ROWS` rows; returns [T, N]."""
    padded = pad_rows(x)
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    for tile, result in zip(padded.split(ROWS), out.split(ROWS)):
        torch.mm(tile, weight.t(), out=result)
    return out[: x.shape[0]]
