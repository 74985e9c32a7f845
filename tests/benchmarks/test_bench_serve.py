# SPDX-License-Identifier: Apache-2.0
"""`bench_serve.py`: figures from streams made by hand, and two rounds against vLLM's own front end."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmarks import bench_serve
from benchmarks.bench_serve import Round, Stream, counters, figures, parse, parse_requests, risen, run, streams
from tests.chat.driver import ScriptedServer, write_model
from tests.repo.checkout import ROOT
from vllm.ampere.errors import AmpereError, UsageError

EXPOSITION = """\
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 12.0
# TYPE vllm:spec_decode_num_accepted_tokens_created gauge
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 4.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 0.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 9.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 0.5
"""
DETAILED = {
    "duration": 2.0, "completed": 2, "errors": ["", ""], "start_times": [100.0, 100.5], "ttfts": [0.2, 0.4],
    "itls": [[0.01, 0.03], []], "output_lens": [5, 1], "generated_texts": ["abc", "d"],
}  # fmt: skip


def test_a_stream_keeps_the_time_of_each_piece():
    first, second = streams(DETAILED)
    assert (first.start_s, first.tokens, first.text) == (100.0, 5, "abc")
    assert first.arrivals_s == pytest.approx([0.2, 0.21, 0.24]) and second.arrivals_s == [0.4]


def test_measures_of_a_round():
    """Steps are 10 and 30 ms; four tokens follow the first within 40 ms; the stream of one token has neither."""
    got = Round(2.0, streams(DETAILED), {}).measures()
    assert got == pytest.approx({"ttft": 300.0, "step": 20.0, "tpot": 10.0, "rate": 3.0})
    assert Round(2.0, streams(DETAILED)[1:], {}).measures() == pytest.approx({"ttft": 400.0, "rate": 0.5})


@pytest.mark.parametrize("change, message", [
    ({"errors": ["", "Traceback\n  frame\nValueError: too long\n"], "completed": 1}, "ValueError: too long"),
    ({"completed": 1}, "no token came"),
])
def test_a_failed_request_ends_the_run(change, message):
    with pytest.raises(AmpereError, match=f"^1 of 2 requests failed: {message}$"):
        streams(DETAILED | change)


def test_counters_are_added_over_engines_and_gauges_left_out():
    got = counters(EXPOSITION)
    assert got == {
        "vllm:spec_decode_num_accepted_tokens_total": 42.0,
        "vllm:request_success_total{finished_reason=length}": 4.0,
        "vllm:request_success_total{finished_reason=stop}": 0.0,
        "vllm:time_to_first_token_seconds_count": 4.0,
        "vllm:time_to_first_token_seconds_sum": 0.5,
    }
    before = got | {"vllm:spec_decode_num_accepted_tokens_total": 40.0, "vllm:time_to_first_token_seconds_sum": 0.25}
    del before["vllm:request_success_total{finished_reason=length}"]
    assert risen(before, got) == {
        "vllm:spec_decode_num_accepted_tokens_total": 2.0,
        "vllm:request_success_total{finished_reason=length}": 4.0,
        "vllm:time_to_first_token_seconds_sum": 0.25,
    }


def taken(step_s, tokens=4, count=1, **rose):
    """A round of `count` streams with a piece of two tokens each `step_s`, the first after five of them."""
    arrivals = [5 * step_s + i * step_s for i in range(tokens // 2)]
    each = Stream(0.0, arrivals, tokens, "text")
    return Round(arrivals[-1], [each] * count, {f"vllm:spec_decode_num_{n}_total": v for n, v in rose.items()})


def test_ratios_are_within_rounds_and_above_one_where_ours_is_ahead():
    """Ours takes 1, 2 and 4 ms in rounds where the rival takes 2, 3 and 12: 2, 1.5 and 3 times as long."""
    ours, rival = ([taken(ms / 1e3) for ms in times] for times in ((1, 2, 4), (2, 3, 12)))
    found = {f["id"].removeprefix("serve/c/"): f for f in figures("c", "sharegpt", {"ours": ours, "rival": rival})}
    for measure in ("ttft", "step", "tpot", "rate"):
        ratio = found[f"{measure}-vs-rival"]
        assert (ratio["value"], ratio["low"], ratio["high"], ratio["unit"]) == (2.0, 1.5, 3.0, "x"), measure
    assert (found["ours-step"]["value"], found["ours-step"]["low"], found["ours-step"]["high"]) == (2.0, 1.0, 4.0)
    assert found["rival-ttft"]["value"] == 15.0 and found["rival-tpot"]["value"] == 1.0
    assert found["ours-step-spread"]["value"] == 1.5
    assert not [name for name in found if "acceptance" in name]


def test_acceptance_is_that_of_all_rounds_and_of_no_drawn_tokens():
    rounds = [taken(0.1, drafts=10, draft_tokens=50, accepted_tokens=20),
              taken(0.1, drafts=30, draft_tokens=150, accepted_tokens=100)]  # fmt: skip
    found = {f["id"]: f["value"] for f in figures("c", "sharegpt", {"ours": rounds})}
    assert found["serve/c/ours-acceptance"] == 0.6 and found["serve/c/ours-tokens-per-step"] == 4.0
    assert not [name for name in found if "-vs-" in name]
    for dataset in bench_serve.DRAWN:
        assert not [f for f in figures("c", dataset, {"ours": rounds}) if "accept" in f["id"] or "per-step" in f["id"]]


def test_servers_alternate_and_the_warm_up_is_not_counted(monkeypatch):
    order = []

    def record(name, url, requests, seed):
        order.append((name, url, seed))
        return taken(0.1, count=len(order))

    monkeypatch.setattr(bench_serve, "run_round", record)
    rounds = run({"a": "A", "b": "B"}, SimpleNamespace(), 3, 7)
    assert order == [("a", "A", 7), ("b", "B", 7), ("b", "B", 8), ("a", "A", 8), ("a", "A", 9), ("b", "B", 9),
                     ("b", "B", 10), ("a", "A", 10)]  # fmt: skip
    assert {name: [len(r.streams) for r in each] for name, each in rounds.items()} == {"a": [4, 5, 8], "b": [3, 6, 7]}


SERVER = ["--case", "c", "--server", "ours=http://127.0.0.1:1/"]


def test_arguments():
    found, rest = parse([*SERVER, "--server", "b=https://localhost:2", "--", "--input-len", "5", "--", "x"])
    assert found.server == [("ours", "http://127.0.0.1:1"), ("b", "https://localhost:2")] and found.rounds == 5
    assert rest == ["--input-len", "5", "--", "x"]


@pytest.mark.parametrize("words, message", [
    ([], "the following arguments are required: --case, --server"),
    (["--case", "c", "--server", "127.0.0.1:8000"], "is not NAME=URL"),
    (["--case", "A B", *SERVER[2:]], "small letters"),
    ([*SERVER, "--rounds", "0"], "is not a number of rounds"),
    ([*SERVER, *SERVER[2:]], "two with different names"),
    ([*SERVER, "--output", "r.json"], "--output needs --scope"),
    ([*SERVER, "--", "--num-prompts", "5", "--seed", "1"], "--seed is set by each round"),
    ([*SERVER, "--", "--base-url=http://localhost"], "--base-url=http://localhost is set by each round"),
    ([*SERVER, "--", "--save_detailed"], "--save_detailed is set by each round"),
])
def test_a_wrong_command_line(words, message):
    with pytest.raises(UsageError, match=message):
        parse(words)


def bench(*words):
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_serve.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400)


@pytest.mark.parametrize("words, code, lines", [
    (("--server", "x"), 2, ["error: argument --server: 'x' is not NAME=URL, as in ours=http://127.0.0.1:8000",
                            "hint: python benchmarks/bench_serve.py --help"]),
    (("--server", "ours=http://127.0.0.1:9"), 1, [
        "error: ours: http://127.0.0.1:9/version does not answer: [Errno 111] Connection refused",
        "hint: start the server, and name its address"]),
])  # fmt: skip
def test_a_mistake_is_one_line_and_a_hint(words, code, lines):
    done = bench("--case", "c", *words)
    assert (done.returncode, done.stdout, done.stderr.splitlines()) == (code, "", lines)


# ---- vLLM's own front end, over a scripted engine


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with ScriptedServer("v41", write_model(folder / "model"), folder) as running:
        yield running


def scripted(server, tokens):
    """Arguments under which each request is answered with these tokens, one a step."""
    body = json.dumps({"vllm_xargs": {"ids": tokens, "eos": 0}})
    return ("--num-prompts", "3", "--input-len", "6", "--output-len", str(len(tokens)), "--extra-body", body)


@pytest.mark.vllm
def test_rounds_against_the_front_end(server, tmp_path):
    """The same server under two names: streams of four pieces, counters that add up, equal answers."""
    url, path = server.base_url.removesuffix("/v1"), tmp_path / "receipt.json"
    done = bench("--case", "scripted", "--server", f"a={url}", "--server", f"b={url}", "--rounds", "2", "--output",
                 str(path), "--scope", "no model", "--", *scripted(server, [100, 200, 300, 400]))  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    content = json.loads(path.read_text())
    assert (content["kind"], content["scope"]) == ("serve", "no model")
    assert content["samples"]["dataset"] == "random" and "version" in content["samples"]["versions"]["a"]
    assert content["correctness"] == "12 requests, none failed; 6 of 6 answers are equal on both servers"
    values = {f["id"].removeprefix("serve/scripted/"): f["value"] for f in content["figures"]}
    assert all(value > 0 for name, value in values.items() if not name.endswith("spread"))
    assert values.keys() >= {f"{m}-vs-b" for m in bench_serve.MEASURES} | {f"a-{m}" for m in bench_serve.MEASURES}
    for name in ("a", "b"):
        for each in content["samples"][name]:
            assert each["counters"]["vllm:generation_tokens_total"] == 12
            assert each["counters"]["vllm:request_success_total{finished_reason=length}"] == 3
            for stream in each["requests"]:
                assert stream["tokens"] == 4 and 1 <= len(stream["arrivals_s"]) <= 4
                assert stream["arrivals_s"] == sorted(stream["arrivals_s"]) and stream["arrivals_s"][0] > 0
    prompts = [tuple(seen["prompt_ids"]) for seen in server.seen()]
    assert len(prompts) == 18 and len(set(prompts)) == 9  # three rounds of three, each sent to both
    assert [line.split()[-1] for line in done.stdout.splitlines()] == [f["id"] for f in content["figures"]]


@pytest.mark.vllm
def test_what_vllm_does_not_know_or_cannot_do_is_one_line(monkeypatch):
    with pytest.raises(UsageError, match="^vllm bench serve: unrecognized arguments: --num-promts 3$"):
        parse_requests(["--num-promts", "3"])
    monkeypatch.setattr(bench_serve, "fetch", lambda *_: "")
    words = ("--model", "none", "--skip-tokenizer-init", "--dataset-name", "custom", "--dataset-path", "no.jsonl")
    asked = parse_requests(list(words))
    with pytest.raises(AmpereError, match="^ours: .") as caught:
        bench_serve.run_round("ours", "http://127.0.0.1:9", asked, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.vllm
def test_another_client_on_the_server_is_noticed(server, monkeypatch):
    """The counter rose by more tokens than the run received."""
    from vllm.benchmarks import serve

    name, values = "vllm:generation_tokens_total", iter([5.0, 12.0])
    monkeypatch.setattr(bench_serve, "fetch", lambda *_: f"# TYPE {name} counter\n{name} {next(values)}\n")
    monkeypatch.setattr(serve, "main", lambda _: DETAILED)
    with pytest.raises(AmpereError, match="generated 7 tokens, 6 of them in this run"):
        bench_serve.run_round("ours", "http://localhost", SimpleNamespace(), 0)
