# SPDX-License-Identifier: Apache-2.0
"""The Triton boundary of hyper-connections beside its reference; `tests/gpu/test_mhc.py` runs the same on a card."""

import pytest
import torch

from tests.compiled.test_indexer import NAN, moved, triton_of
from vllm.ampere.kernels.mhc import mhc_long_triton as long_batches
from vllm.ampere.kernels.mhc import mhc_post_pre_triton as kernels
from vllm.ampere.kernels.mhc.mhc_post_pre import OP
from vllm.ampere.kernels.registry import Case
from vllm.ampere.testing.parity import assert_parity, assert_same_bits, produce

ROWS = ("y", "streams", "post", "comb", "pre_mix")


# Without a card a round takes as long as all else; the model's 20 are in the op's own cases.
ROUNDS = 20 if torch.cuda.is_available() else 3


def boundary(seed, tokens, dim=96, aux=True):
    return Case("", {"T": tokens, "D": dim, "aux": aux}, OP.cases[0].make).inputs(seed) | {"sinkhorn_iters": ROUNDS}


def computed(given, device):
    """What the kernels make of the arguments, having met the reference; streams and mean have its bits."""
    got = produce(OP, triton_of(OP), moved(given, device))
    want = produce(OP, OP.reference, given)
    assert_parity(OP, got, want)
    got = {name: tensor.cpu() for name, tensor in got.items()}
    assert_same_bits({"streams": got["streams"]}, {"streams": want["streams"]})
    return got


@pytest.mark.parametrize("tokens", [1, 4, 5, 33, 66])
@pytest.mark.parametrize("without", ["", "pre_mix", "norm_weight"])
def test_few_and_many_tokens_and_the_models_entry(device, tokens, without):
    """Past one tile of each kind; without a mix the input is stream 0, without a weight it has no norm."""
    given = boundary(tokens, tokens, aux=not without)
    computed(given | ({without: None} if without else {}), device)


@pytest.mark.parametrize("dim", [96, 72])
@pytest.mark.parametrize("without", ["", "pre_mix", "norm_weight"])
def test_long_batches(device, monkeypatch, dim, without):
    """Expanded and projected by two kernels, here from the first token on; 72 leaves the last block of columns half full."""
    monkeypatch.setattr(kernels, "_LONG", 0)
    given = boundary(9, 9, dim, aux=not without)
    given |= {without: None} if without else {}
    whole = computed(given, device)
    given = moved(given, device)
    assert_same_bits({n: t.cpu() for n, t in produce(OP, triton_of(OP), given).items()}, whole)
    first = produce(OP, triton_of(OP), given | {name: given[name][:5] for name in ROWS if name != without})
    assert_same_bits({n: t.cpu() for n, t in first.items()}, {n: t[:5] for n, t in whole.items()})


def test_strided_rows_and_tokens_of_zeros(device):
    given = boundary(1, 6)
    given["streams"] = torch.cat([given["streams"], given["streams"]], 1)[:, :4]
    given["y"] = torch.cat([given["y"], given["y"]], 1)[:, :96]
    given["streams"][2], given["y"][2] = 0, 0
    got = computed(given, device)
    assert not got["layer_input"][2].any() and got["comb"][2].isfinite().all()


def test_a_token_of_nan_spoils_no_other(device):
    given = boundary(2, 6)
    clean = computed(given, device)
    given["streams"][3, 1, 7] = NAN
    got = produce(OP, triton_of(OP), moved(given, device))
    kept = torch.arange(6) != 3
    assert_same_bits({n: t.cpu()[kept] for n, t in got.items()}, {n: t[kept] for n, t in clean.items()})
    assert got["layer_input"][3].isnan().all()


@pytest.mark.parametrize("tokens, other", [(7, 2), (70, 40)])
def test_same_bits_twice_and_in_batches_of_one_tiling(device, tokens, other):
    given = moved(boundary(3, tokens), device)
    whole = produce(OP, triton_of(OP), given)
    assert_same_bits(produce(OP, triton_of(OP), given), whole)
    first = produce(OP, triton_of(OP), given | {name: given[name][:other] for name in ROWS})
    assert_same_bits(first, {name: tensor[:other] for name, tensor in whole.items()})


@pytest.mark.parametrize("dim", [96, 5120])
def test_splits_cover_a_token_and_fill_a_card(dim):
    for tokens in (*range(257, 3000), 8192, 16_384, 1 << 20):
        rows, share, splits = long_batches.splits_of(tokens, dim)
        blocks = 4 * dim // 64
        assert (splits - 1) * share < blocks <= splits * share and splits <= 32
        assert -(-tokens // rows) * splits >= min(128, blocks)
