# SPDX-License-Identifier: Apache-2.0
"""Figures of the two-card benchmarks, from measurements that are made up."""

import pytest

from benchmarks import bench_all_reduce, bench_pipeline
from benchmarks.bench_rank_slice import POINTS, write_config
from vllm.ampere.planner.latency import all_reduce_us
from vllm.ampere.planner.inventory import LINKS, LinkKind
from vllm.ampere.planner.pipeline import payload_bytes

PADDED = 1.25


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slice")
    write_config(folder)
    return bench_pipeline.spec_of(folder)


def engine(spec, start: int, token_s: float, prefill_s: float) -> dict:
    """What a child prints; a step of four tokens is sent as one of five."""
    points = {}
    for requests, context in POINTS:
        rows = max(int(requests * PADDED), 1)
        payload = payload_bytes(spec, start, False, rows, rows, context) if start else {}
        sent = [{name: [rows, nbytes] for name, nbytes in payload.items()}] * 10
        points[f"bs{requests}-ctx{context}"] = {"token_s": token_s, "prefill_s": prefill_s, "extra": [sent, []]}
    return points


def test_pipeline(spec):
    found = {"40": engine(spec, 0, 0.010, 2.0), "14,26": engine(spec, 14, 0.0125, 1.25)}
    figures = {each["id"].removeprefix("rank_slice_pp2/"): each["value"] for each in bench_pipeline.figures_of(spec, found)}
    assert figures["40/bs8-ctx16k/token"] == 10.0 and figures["14,26/bs8-ctx16k/token-beyond-one-card"] == 2.5
    assert figures["14,26/bs8-ctx16k/decode-bubble"] == 0.6 and figures["14,26/bs8-ctx16k/prefill-bubble"] == 0.2
    assert figures["14,26/bs8-ctx16k/prefill-rate"] == round(8 * 16_384 / 1.25)
    assert figures["14,26/bs8-ctx16k/bytes-over-planned"] == 1.0
    assert figures["14,26/bs8-ctx16k/decode-bytes-over-planned"] == PADDED
    assert figures["14,26/bs8-ctx16k/decode-bytes"] == 10 * (4 * 5_120 * 2 + 16)


def test_all_reduce():
    link = LINKS[LinkKind.NVLINK]
    found = {"own_kernel": True, "vllm": {str(10 << 10): 4.0}}
    found["nccl"] = {str(nbytes): all_reduce_us(link, 2, nbytes) for nbytes in bench_all_reduce.SIZES}
    figures = {each["id"].removeprefix("all_reduce/"): each["value"] for each in bench_all_reduce.figures_of(found, 2)}
    assert figures["2x640KiB/model-fitted-over-nccl"] == figures["2x640KiB/model-shipped-over-nccl"] == 1.0
    assert figures["2x10KiB/model-shipped-over-vllm"] == round(all_reduce_us(link, 2, 10 << 10) / 4.0, 3)
    assert "2x640KiB/vllm-time" not in figures
