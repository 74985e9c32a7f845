# SPDX-License-Identifier: Apache-2.0
"""Upstream's embedding on our look-up and our allocation."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm.models.deepseek_v41.common.engram", reason="vLLM is not installed")

from vllm.ampere import arch, pinned_memory  # noqa: E402
from vllm.ampere.integration import engram, gate  # noqa: E402
from vllm.ampere.kernels.engram.engram_lookup import OP, engram_lookup  # noqa: E402


@pytest.mark.parametrize("start", [0, 2, 9])
def test_rows_are_written_where_they_are_staged(monkeypatch, start):
    """Three columns of a rank, of 11: the last rank has two, and zeros."""
    monkeypatch.setattr(gate, "architecture", lambda: arch.CPU)
    given = OP.cases[1].inputs(seed=4)
    hashes = torch.randint(given["first_row"] - 9, given["end_row"] + 9, (13, 11))
    embedding = SimpleNamespace(
        _storage=lambda: (given["table"].view(torch.float8_e4m3fn), given["scales"]), head_start=start,
        part_n_hash_cols=3, vocab_start_idx=given["first_row"], vocab_end_idx=given["end_row"],
    )
    staged = torch.full((20, 3, 256), torch.nan, dtype=torch.bfloat16)
    assert engram.look_up(embedding, hashes, staged[:13])
    want = engram_lookup(given["table"], given["scales"], hashes[:, start : start + 3], *(given[n] for n in ("first_row", "end_row")))
    assert torch.equal(staged[:13, : want.shape[1]], want) and want.any()
    assert not staged[:13, want.shape[1] :].any() and staged[13:].isnan().all()


def _allocated(monkeypatch, use_thp, architecture):
    """What upstream's `_allocate_weights` returns for a small table, and the sizes that were pinned."""
    from vllm.models.deepseek_v41.common.engram import ParallelEngramEmbedding

    sizes = []

    def allocate(size_bytes):
        sizes.append(size_bytes)
        return torch.zeros(size_bytes, dtype=torch.uint8)

    monkeypatch.setattr(pinned_memory, "allocate", allocate)
    monkeypatch.setattr(gate, "architecture", lambda: architecture)
    embedding = SimpleNamespace(
        dim=256, block_size=32, cpu_offload=True, peer_rows=0, dp_shared_memory=False, use_thp=use_thp,
        part_num_embeddings=1009, _packed=None,
    )
    return embedding, sizes, lambda: ParallelEngramEmbedding._allocate_weights(embedding)


def test_a_table_takes_its_bytes_and_no_more(monkeypatch):
    embedding, sizes, allocate = _allocated(monkeypatch, True, arch.ARCHITECTURES["sm80"])
    codes, scales = allocate()
    assert sizes == [1009 * 264] and embedding._packed.numel() == 1009 * 264
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (1009, 256)
    assert scales.dtype == torch.uint8 and scales.shape == (1009, 8)
    assert scales.data_ptr() - codes.data_ptr() == 1009 * 256 and codes.data_ptr() == embedding._packed.data_ptr()


@pytest.mark.parametrize("use_thp, architecture", [(False, "sm80"), (True, None), (True, "cpu")])
def test_upstream_allocates_where_we_decline(monkeypatch, use_thp, architecture):
    embedding, sizes, _ = _allocated(monkeypatch, use_thp, architecture and arch.ARCHITECTURES[architecture])
    assert engram.allocate_table(embedding) is None and sizes == [] and embedding._packed is None


def test_tables_go_to_the_host_or_the_start_ends(monkeypatch):
    """Unless told otherwise; where the card cannot read host memory, upstream does not put them on the card instead."""
    from vllm.config.engram import EngramConfig
    from vllm.models.deepseek_v41.common import engram as upstream

    assert EngramConfig().cpu_offload
    monkeypatch.setattr(upstream, "is_uva_available", lambda: False)
    monkeypatch.setattr(upstream, "get_engram_dp_size", lambda: 1)
    with pytest.raises(RuntimeError, match="CPU offload requires UVA"):
        upstream.ParallelEngramEmbedding(1009, 256, (1009,), cpu_offload=EngramConfig().cpu_offload)
