# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from vllm.ampere.kernels.row_tiles import pad_rows, row_matmul


@pytest.mark.parametrize("threads", [1, 2])
def test_row_matmul_gives_a_row_the_same_bits_in_any_batch(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = torch.randn(37, 1024), torch.randn(24, 1024)
        whole = row_matmul(x, weight)
        assert (whole - (x.double() @ weight.double().t())).abs().max() < 1e-3
        for rows in (1, 2, 3, 5, 16, 17, 36):
            assert torch.equal(row_matmul(x[:rows], weight), whole[:rows])
            assert torch.equal(row_matmul(x[-rows:], weight), whole[-rows:])
    finally:
        torch.set_num_threads(before)


def test_padding_is_zero_and_nothing_where_none_is_needed():
    x = torch.randn(17, 3)
    padded = pad_rows(x)
    assert torch.equal(padded[:17], x) and padded.shape == (32, 3) and not padded[17:].any()
    assert pad_rows(x[:16]).shape == (16, 3) and pad_rows(x[:0]).shape == (0, 3)
    assert row_matmul(x[:0], torch.randn(5, 3)).shape == (0, 5)
