# SPDX-License-Identifier: Apache-2.0
"""Traces with known sums, and what is no trace."""

import gzip
import json
import os

import pytest

from vllm.ampere.cli import main as cli
from vllm.ampere.errors import AmpereError
from vllm.ampere.profiler import find_traces, read


def span(category, name, start_us, duration_us, thread=7, **args):
    where = {"pid": 0, "tid": thread, "ts": start_us, "dur": duration_us}
    return {"ph": "X", "cat": category, "name": name, "args": args} | where


def frame(name, start_us, duration_us):
    return span("python_function", name, start_us, duration_us, thread=1)


def launched(name, start_us, duration_us, call_us, correlation, stream=7):
    return [
        span("cuda_runtime", "cudaLaunchKernel", call_us, 1, thread=1, correlation=correlation),
        span("kernel", name, start_us, duration_us, thread=stream, correlation=correlation),
    ]


# Two streams: [100, 140] and [120, 160] overlap by 20; nothing runs in [160, 200] and [230, 260].
STREAMS = [
    span("user_annotation", "execute_context_0(0)_generation_1(1)", 0, 50, thread=1),
    span("user_annotation", "execute_context_0(0)_generation_1(1)", 60, 50, thread=1),
    span("gpu_user_annotation", "execute_context_0(0)_generation_1(1)", 100, 50),
    span("kernel", "_sparse_mla_decode_kernel", 100, 40),
    span("kernel", "void marlin_moe_wna16::Marlin<x>", 120, 40, thread=8),
    span("kernel", "_mqa_logits_kernel", 200, 30),
    span("kernel", "_mqa_logits_kernel", 205, 10, thread=8),
    span("gpu_memcpy", "Memcpy DtoD", 260, 40),
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
]


def write(path, events, **more):
    path.write_text(json.dumps({"traceEvents": events} | more))
    return path


def totals(summary):
    return {row["stage"]: (row["calls"], row["total_ms"]) for row in summary.rows}


def test_sums_of_overlapping_streams(tmp_path):
    path = write(tmp_path / "a.json", STREAMS, deviceProperties=[{"name": "A card"}])
    (summary,) = read([path])
    assert totals(summary) == {
        "attention": (1, 0.04), "indexer": (2, 0.04), "routed experts": (1, 0.04), "other": (1, 0.04),
        "host gap": (None, 0.07),
    }  # fmt: skip
    assert (summary.device, summary.steps, summary.window_ms) == ("A card", 2, 0.2)
    assert summary.overlap_ms == pytest.approx(0.03)
    assert sum(row["share"] for row in summary.rows) == pytest.approx(1 + 0.03 / 0.2)
    rows = {row["stage"]: row for row in summary.rows}
    assert rows["indexer"]["average_us"] == pytest.approx(20) and rows["indexer"]["per_step_ms"] == pytest.approx(0.02)
    assert summary.others == [{"name": "Memcpy DtoD", "calls": 1, "total_ms": 0.04}]


def test_frames_tell_a_gemm_of_the_shared_expert_and_of_the_draft(tmp_path):
    gemm = "nvjet_sm90_tst_128x8"
    events = [
        frame("nn.Module: DeepseekV4MLP_3", 0, 10), frame("nn.Module: MergedColumnParallelLinear_5", 1, 8),
        frame("vllm/models/deepseek_v41/nvidia/dspark.py(10): forward", 20, 10),
        frame("vllm/model_executor/layers/linear.py(9): forward", 40, 10),
        *launched(gemm, 100, 1, 2, 1), *launched(gemm, 110, 2, 22, 2), *launched(gemm, 120, 4, 42, 3),
        *launched(gemm, 130, 8, 60, 4),
        *launched("elementwise_kernel", 140, 16, 43, 5), *launched("_mhc_post_kernel", 160, 32, 3, 6),
    ]  # fmt: skip
    (summary,) = read([write(tmp_path / "a.json", events)])
    found = totals(summary)
    assert found.pop("host gap")[1] == pytest.approx(0.029)
    assert found == {
        "shared expert": (1, 0.001), "draft": (1, 0.002), "dense": (3, pytest.approx(0.028)), "mHC": (1, 0.032)
    }  # fmt: skip
    assert summary.steps == 0 and all(row["per_step_ms"] is None for row in summary.rows)


def test_only_outermost_operators_of_a_processor_count(tmp_path):
    events = [
        frame("vllm/ampere/kernels/attention/reference.py(3): sparse_mla_decode_ref", 0, 100),
        span("cpu_op", "aten::linear", 10, 40, thread=1), span("cpu_op", "aten::mm", 20, 10, thread=1),
        span("cpu_op", "aten::linear", 200, 10, thread=1), span("cpu_op", "aten::strange", 210, 5, thread=1),
    ]  # fmt: skip
    (summary,) = read([write(tmp_path / "a.json", events)])
    found = totals(summary)
    assert found.pop("host gap")[1] == pytest.approx(0.150)
    assert found == {"attention": (1, 0.04), "dense": (1, 0.01), "other": (1, 0.005)}
    assert summary.device == "cpu"


def test_a_folder_shows_the_newest_of_each_process_and_leaves_out_the_frontend(tmp_path):
    kernel = span("kernel", "_mqa_logits_kernel", 0, 10)
    for number, (name, events) in enumerate({
        "rank0.111.pt.trace.json": [kernel, kernel], "rank0.222.pt.trace.json": [kernel],
        "front.333.pt.trace.json": [span("cpu_op", "aten::mm", 0, 5)],
    }.items()):  # fmt: skip
        os.utime(write(tmp_path / name, events), (number, number))
    packed = tmp_path / "rank1.111.pt.trace.json.gz"
    packed.write_bytes(gzip.compress(json.dumps({"traceEvents": [kernel]}).encode()))
    found = read(find_traces(tmp_path))
    assert [summary.trace for summary in found] == ["rank0.222.pt.trace.json", "rank1.111.pt.trace.json.gz"]
    assert totals(found[0])["indexer"] == (1, 0.01)


def refused(capsys, *words):
    status = cli.main(["profile", *map(str, words)])
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 2 and lines[0].startswith("error: ") and lines[1].startswith("hint: ")
    return status, lines[0]


@pytest.mark.parametrize("content, message", [
    (b"not json", "is not a trace"), (b"[]", "it has no traceEvents"), (b'{"traceEvents": 3}', "it has no traceEvents"),
    (b"\x1f\x8bbroken", "is not a trace"), (gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:-20], "is not a trace"),
    (b'{"traceEvents": []}', "nothing ran"), (b'\xff\xfe{"a"', "is not a trace"),
])  # fmt: skip
def test_what_is_no_trace(capsys, tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    status, line = refused(capsys, tmp_path / "a.json")
    assert status == 1 and message in line


def test_what_is_not_there(capsys, tmp_path):
    assert refused(capsys, tmp_path / "none") == (1, f"error: there is no {tmp_path / 'none'}")
    assert refused(capsys, tmp_path) == (1, f"error: {tmp_path} holds no trace")
    assert refused(capsys, "--model", tmp_path) == (1, f"error: {tmp_path} holds no config.json")


@pytest.mark.parametrize("words", [
    [], ["a", "--model", "b"], ["--server", "http://127.0.0.1:1"], ["a", "--steps", "0"], ["a", "--seconds", "nan"],
    ["a", "--", "--max-model-len", "9"],
])  # fmt: skip
def test_usage(capsys, words):
    assert refused(capsys, *words)[0] == 2


def test_the_table_and_the_document_say_the_same(capsys, tmp_path):
    path = write(tmp_path / "a.json", STREAMS)
    assert cli.main(["profile", str(path), "--format", "json", "--output", str(tmp_path / "out.json")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "out.json").read_text())
    assert {row["stage"]: row["total_ms"] for row in document["traces"][0]["rows"]}["indexer"] == 0.04
    assert cli.main(["profile", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["stage", "calls", "total", "ms", "average", "us", "share", "ms", "per", "step"]
    assert ["indexer", "2", "0.040", "20.0", "20.0%", "0.020"] in [line.split() for line in lines]
    assert ["host", "gap", "-", "0.070", "-", "35.0%", "0.035"] in [line.split() for line in lines]


def test_an_output_that_cannot_be_written(capsys, tmp_path):
    assert refused(capsys, write(tmp_path / "a.json", STREAMS), "--output", tmp_path / "no" / "out.json")[0] == 1


def test_find_traces_raises_of_itself(tmp_path):
    with pytest.raises(AmpereError, match="holds no trace"):
        find_traces(tmp_path)
