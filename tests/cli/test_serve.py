# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere serve` in process: what it would start, what it refuses, and that it becomes that process."""

import contextlib
import functools
import json
import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.planner.hollow import write_hollow
from vllm.ampere import doctor, nodes, serving
from vllm.ampere.cli import box
from vllm.ampere.cli import main as cli
from vllm.ampere.doctor import Finding, Status
from vllm.ampere.errors import PatchError
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.patching import tree
from vllm.ampere.planner import presets
from vllm.ampere.testing import tiny_tokenizer

FITTING = {
    "a100-80g-x8-tp8": (8, "", False),
    "a100-80g-x8-tp8-ep": (8, "", True),
    "a6000-48g-x8-tp4-pp2": (4, "20,20", False),
    "a800-80g-x8-tp4-pp2": (4, "20,20", False),
}
TWO_NODES = "a800-40g-x16-tp8-pp2"
OURS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "VLLM_HOST_IP", "VLLM_PP_LAYER_PARTITION", "VLLM_API_KEY",
        "TRITON_CACHE_DIR", "TILELANG_CACHE_DIR", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_WORKER_MULTIPROC_METHOD", "CUDA_VISIBLE_DEVICES")


# A header of 12 MB is read once, not for every run.
WEIGHT_TABLE = functools.cache(box.weight_table)


@pytest.fixture(scope="session")
def release(tmp_path_factory):
    """The released checkpoint with holes for its values."""
    folder = tmp_path_factory.mktemp("release")
    write_hollow(folder, ModelSpec(), tiny_tokenizer.deepseek().to_str())
    return folder


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """No variable of ours, a cache folder, no card, and the interfaces of a node in a data centre."""
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(box, "weight_table", WEIGHT_TABLE)
    found = [("lo", "127.0.0.1"), ("docker0", "198.51.100.1"), ("ib0", "192.0.2.5"), ("eno1", "203.0.113.5")]
    monkeypatch.setattr(nodes, "interfaces", lambda: [nodes.Interface(*pair) for pair in found])


@pytest.fixture
def route(monkeypatch):
    """Let every address be reached from a given one of this node."""
    def from_address(own):
        probe = SimpleNamespace(connect=lambda target: None, getsockname=lambda: (own, 9))
        monkeypatch.setattr(nodes.socket, "socket", lambda *_: contextlib.nullcontext(probe))

    return from_address


@pytest.fixture
def serve(capsys):
    def run(*words):
        status = cli.main(["serve", *map(str, words)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def dry(serve):
    """A dry run that must succeed: its document, and what it warned of."""
    def run(model, *words):
        given = words[words.index("--") :] if "--" in words else ()
        own = words[: len(words) - len(given)]
        status, out, err = serve(model, *own, "--dry-run", "--format", "json", *given)
        assert status == 0, err
        return json.loads(out), err

    return run


def options(document) -> dict:
    """Flags of the server to their values; True for a bare one."""
    words = document["command"][document["command"].index("serve") + 2 :]
    found, flag = {}, ""
    for word in words:
        if word.startswith("-"):
            flag, found[word] = word, True
        else:
            found[flag] = word
    return found


@pytest.mark.parametrize("name", FITTING)
def test_a_preset_becomes_arguments(dry, release, tmp_path, name):
    document, _ = dry(release, "--preset", name)
    tensor, partition, experts = FITTING[name]
    preset, found = presets.load(name), options(document)
    assert document["command"][:6] == [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(release)]
    assert found.pop("--enable-expert-parallel", False) is experts
    assert found == {
        "--tensor-parallel-size": str(tensor), "--pipeline-parallel-size": str(partition.count(",") + 1),
        "--max-model-len": str(preset.serving.context), "--max-num-seqs": str(preset.serving.requests),
        "--max-num-batched-tokens": str(preset.serving.batched_tokens), "--gpu-memory-utilization": "0.92",
        "--engram-config": '{"cpu_offload":true,"use_thp":true}',
        "--speculative-config": '{"method":"dspark","num_speculative_tokens":5}',
        "--served-model-name": "deepseek-v4.1-flash", "--reasoning-parser": "deepseek_v41",
        "--enable-auto-tool-choice": True, "--tool-call-parser": "deepseek_v41",
    }
    caches = {f"{name}_CACHE_DIR": str(tmp_path / "cache/vllm-ampere" / name.lower()) for name in ("TRITON", "TILELANG")}
    cut = {"VLLM_PP_LAYER_PARTITION": partition} if partition else {}
    assert document["environment"] == {**cut, **caches, "VLLM_ENGINE_READY_TIMEOUT_S": "3600", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    assert document["unset"] == []


@pytest.mark.parametrize("rank, own", [(0, "192.0.2.5"), (1, "203.0.113.5")])
def test_two_nodes_differ_in_their_rank_only(dry, release, route, rank, own):
    route(own)
    master = "192.0.2.5"
    document, err = dry(release, "--preset", TWO_NODES, "--node-rank", rank, "--master-addr", master)
    found = options(document)
    assert (found["--tensor-parallel-size"], found["--pipeline-parallel-size"]) == ("8", "2")
    assert (found["--nnodes"], found["--node-rank"], found["--master-addr"]) == ("2", str(rank), master)
    assert found.get("--headless", False) is (rank == 1)
    name = {"192.0.2.5": "ib0", "203.0.113.5": "eno1"}[own]
    variables = document["environment"]
    assert variables["VLLM_PP_LAYER_PARTITION"] == "20,20"
    assert (variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"]) == (f"={name}", name)
    assert variables["VLLM_HOST_IP"] == own
    assert ("asks for no key" in err) == (rank == 0)  # the other listens nowhere


@pytest.mark.parametrize("own, master, rank, words", [
    ("198.51.100.1", "198.51.100.1", 0, "is reached over docker0, which no other node reaches"),
    ("127.0.0.1", "127.0.0.1", 0, "is reached over lo, which no other node reaches"),
    ("192.0.2.5", "192.0.2.9", 0, "--node-rank 0 does not go with --master-addr 192.0.2.9, which is not an address of"),
    ("192.0.2.5", "192.0.2.5", 1, "--node-rank 1 does not go with --master-addr 192.0.2.5, which is this node's own"),
])
def test_nodes_that_could_not_meet(serve, release, route, own, master, rank, words):
    route(own)
    status, out, err = serve(release, "--preset", TWO_NODES, "--node-rank", rank, "--master-addr", master, "--dry-run")
    error, hint = err.splitlines()[-2:]
    assert (status, out) == (1, "") and words in error and hint.startswith("hint: ")
    if "reached over" in words:
        assert "eno1 (203.0.113.5), ib0 (192.0.2.5)" in hint and "docker0" not in hint


def test_an_interface_by_name(dry, serve, release, monkeypatch):
    two = (release, "--preset", TWO_NODES, "--node-rank", 1, "--master-addr", "192.0.2.9")
    assert dry(*two, "--interface", "eno1")[0]["environment"]["VLLM_HOST_IP"] == "203.0.113.5"
    status, _, err = serve(*two, "--interface", "eth7", "--dry-run")
    assert status == 2 and "no network interface 'eth7'" in err and "ib0" in err
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    variables = dry(*two)[0]["environment"]
    assert variables["VLLM_HOST_IP"] == "192.0.2.5" and not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & {*variables}


def test_the_users_arguments_win_and_are_named(dry, release):
    given = ("--", "--max_model_len=65536", "-tp", 4, "--disable-auto-tool-choice", "--engram-config.use_thp", "false",
             "--seed", 7)
    document, err = dry(release, "--preset", "a100-80g-x8-tp8", *given)
    command, found = document["command"], options(document)
    assert command[-8:] == list(map(str, given[1:]))
    assert not {"--max-model-len", "--tensor-parallel-size", "--enable-auto-tool-choice", "--engram-config"} & {*found}
    assert found["--engram-config.cpu_offload"] == "true"
    assert "warning: --max_model_len=65536 is yours; the plan has --max-model-len 1048576\n" in err
    assert "warning: -tp 4 is yours; the plan has --tensor-parallel-size 8\n" in err
    assert "--seed" not in err


def test_dry_run_can_be_pasted(serve, release, monkeypatch, tmp_path):
    """A shell runs the printed text with a program in vLLM's place, which says what reached it."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "14,14,12")
    given = ("--", "--chat-template", "it's a $HOME of \"quotes\"")
    status, out, err = serve(release, "--preset", "a100-80g-x8-tp8", "--dry-run", *given)
    assert status == 0 and "VLLM_PP_LAYER_PARTITION=14,14,12 does not go with this plan" in err
    said = tmp_path / "said"
    said.write_text("import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))")
    shown = out.replace("-P -m vllm.entrypoints.cli.main", shlex.quote(str(said)))
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True)
    words, variables = json.loads(done.stdout)
    document = json.loads(serve(release, "--preset", "a100-80g-x8-tp8", "--dry-run", "--format", "json", *given)[1])
    assert words == document["command"][4:] and words[-1] == given[-1]
    assert document["environment"].items() <= variables.items()
    assert document["unset"] == ["VLLM_PP_LAYER_PARTITION"] and "VLLM_PP_LAYER_PARTITION" not in variables


def test_a_draft_as_asked(dry, release):
    document, err = dry(release, "--preset", "a100-80g-x8-tp8", "--draft-tokens", 3)
    assert options(document)["--speculative-config"] == '{"method":"dspark","num_speculative_tokens":3}'
    assert "warning: a draft of 3 tokens: the checkpoint drafts 5" in err
    assert "--speculative-config" not in options(dry(release, "--preset", "a100-80g-x8-tp8", "--no-draft")[0])


def test_the_users_variables_stay(dry, release, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "8,32")
    document, err = dry(release, "--preset", "a800-80g-x8-tp4-pp2")
    assert "TRITON_CACHE_DIR" not in document["environment"]
    assert document["environment"]["VLLM_PP_LAYER_PARTITION"] == "20,20" and document["unset"] == []
    assert "VLLM_PP_LAYER_PARTITION=8,32 does not go with this plan" in err


@pytest.mark.parametrize("given, variables, where", [
    ([], {}, "all addresses of this machine"),
    (["--host", "0.0.0.0"], {}, "0.0.0.0"),
    (["--host=::"], {}, "::"),
    (["--host", "server.example"], {}, "server.example"),
    (["--host", "127.0.0.1", "--host", "0.0.0.0"], {}, "0.0.0.0"),
    (["--host", "127.0.0.2"], {}, ""),
    (["--host", "::1"], {}, ""),
    (["--host", "localhost"], {}, ""),
    (["--uds", "/run/vllm.sock"], {}, ""),
    (["--api-key", "k"], {}, ""),
    (["--api_key=k"], {}, ""),
    ([], {"VLLM_API_KEY": "k"}, ""),
    ([], {"VLLM_API_KEY": ""}, "all addresses of this machine"),
])
def test_a_server_without_a_key(given, variables, where):
    assert serving.exposed_address(given, variables) == where


def _driver(count, name="NVIDIA A100-SXM4-80GB"):
    def memory(handle, version):
        return SimpleNamespace(total=80 * 2**30, reserved=870 * 2**20)

    return SimpleNamespace(
        NVMLError=RuntimeError, NVML_TOPOLOGY_SYSTEM=50, nvmlMemory_v2=2, nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: count, nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda i: name,
        nvmlDeviceGetUUID=lambda i: f"GPU-{i:08x}", nvmlDeviceGetNvLinkState=lambda i, link: 1,
        nvmlDeviceGetMemoryInfo=memory, nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 40,
    )


def test_the_cards_of_this_machine_are_planned_for(dry, serve, release, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", _driver(8))
    document, err = dry(release)  # no preset: the best layout of what is here
    assert options(document)["--tensor-parallel-size"] == "8" and "no cards" not in err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,GPU-00000003")
    status, _, err = serve(release, "--preset", "a100-80g-x8-tp8", "--dry-run")
    assert status == 1 and "error: TP8xPP1 takes 8 cards, there are 4\nhint: " in err
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    status, _, err = serve(release, "--nodes", 2, "--dry-run")
    assert status == 2 and "takes 2 nodes: --node-rank and --master-addr are needed" in err


@pytest.mark.parametrize("words, status, message, hint", [
    (("{release}", "--preset", "a100-80g-x8-tp"), 2, "there is no preset 'a100-80g-x8-tp'", "did you mean a100-80g-x8-tp8?"),
    (("nowhere", "--preset", "a100-80g-x8-tp8"), 1, "nowhere: there is no such folder", "give the folder"),
    (("{release}/config.json", "--preset", "a100-80g-x8-tp8"), 1, "this is a file, not a checkpoint folder", "give"),
    (("{release}",), 1, "cannot see this machine's cards", "name the cards instead"),
    (("{release}", "--gpus", "8x"), 2, "'8x' is no set of cards", "write CARDSxGIB"),
    (("{release}", "--gpus", "4x80", "--preset", "a100-80g-x8-tp8"), 1, "TP8xPP1 takes 8 cards, there are 4", "plan --all"),
    (("{release}", "--gpus", "8x24", "--preset", "a100-80g-x8-tp8"), 1, "lacks 24.70 GiB", "without the draft:"),
    (("{release}", "--gpus", "6x64", "--partition", "8,12,20"), 1, "layers 20-39 lacks 23.59 GiB", "divided 14,14,12: 23.59"),
    (("{release}", "--gpus", "8x80", "--nodes", "2"), 2, "--nodes 2 contradicts a box of 1", "leave out one"),
    (("{release}", "--nodes", "0"), 2, "'0' is no count", "serve --help"),
    (("{release}", "--gpus", "8x80", "--node-rank", "0"), 2, "takes one node", "--nodes 2"),
    (("{release}", "--gpus", "2x8x40", "--link", "nvlink", "--node-rank", "0"), 2, "--master-addr are needed", "same"),
    (("{release}", "--gpus", "2x8x40", "--node-rank", "2", "--master-addr", "192.0.2.5"), 2, "is not one of 2", "0 to 1"),
    (("{release}", "--gpus", "8x80", "--context", "2M"), 2, "more than the model's 1048576", "--context 1048576"),
    (("{release}", "--presett", "a"), 2, "there is no '--presett'", "did you mean --preset?"),
    ((), 2, "arguments are required: MODEL", "serve --help"),
])
def test_mistakes_are_one_line_and_a_hint(serve, release, words, status, message, hint):
    found, out, err = serve(*(word.format(release=release) for word in words), "--dry-run")
    first, second, *rest = err.splitlines()
    assert (found, out, rest) == (status, "", [])
    assert first.startswith("error: ") and message in first and second.startswith("hint: ") and hint in second


@pytest.mark.parametrize("given, what", [
    (["--enable-dbo"], "--enable-dbo: microbatches"),
    (["--ubatch-size", "2"], "--ubatch-size: microbatches"),
    (["--ubatch-size=2"], "--ubatch-size: microbatches"),
    (["--kv-transfer-config", "{}"], "--kv-transfer-config: a KV connector"),
    (["--kv_transfer_config.kv_connector", "x"], "--kv-transfer-config: a KV connector"),
    (["--kv-offloading-size", "8"], "--kv-offloading-size: a KV connector"),
    (["--enable-lora"], "--enable-lora: LoRA"),
    (["--decode-context-parallel-size", "2"], "--decode-context-parallel-size: decode context parallelism"),
    (["--ubatch-size", "1", "--no-enable-dbo", "--decode-context-parallel-size=1"], None),
])
def test_what_a_relayed_cut_cannot_go_with(release, serve, given, what):
    """Refused before anything starts; taken where no stage reads a cache of an earlier one."""
    six = (release, "--preset", "ga100-64g-x6-tp2-pp3", "--dry-run", "--", *given)
    status, out, err = serve(*six)
    if what is None:
        assert status == 0 and "VLLM_PP_LAYER_PARTITION=14,14,12" in out
        return
    first, second = err.splitlines()[-2:]
    assert (status, out) == (1, "")
    assert first == f"error: {what} cannot go with layers 14,14,12, where a stage reads a cache of an earlier one"
    assert second.startswith("hint: leave it out")
    assert serve(release, "--preset", "a800-80g-x8-tp4-pp2", "--dry-run", "--", *given)[0] == 0


def test_a_layout_over_part_of_two_nodes(release, serve):
    status, _, err = serve(release, "--gpus", "2x6x80", "--preset", "a800-80g-x8-tp4-pp2", "--dry-run")
    assert status == 1 and "TP4xPP2 takes 8 cards of 2 nodes with 6 each" in err


def test_more_behind_the_dashes_is_nobody_elses(serve, capsys):
    assert cli.main(["kernels", "list", "--", "--preset"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


class Started(Exception):
    """The process became another one."""


@pytest.fixture
def start(serve, release, monkeypatch):
    """Run without --dry-run on a box of eight; returns exit status, stderr, and what was started, or None."""
    def run(*words, findings=()):
        called = []

        def execve(*arguments):
            called.append(arguments)
            raise Started

        monkeypatch.setattr(os, "execve", execve)
        seen = []

        def run_checks(system, *, preset, model):
            seen.append((preset, model))
            return list(findings)

        monkeypatch.setattr(doctor, "run_checks", run_checks)
        status, out, err = serve(release, "--gpus", "8x80", "--preset", "a100-80g-x8-tp8", *words)
        assert not out
        return status, err, called, seen

    return run


def finding(code, status):
    return Finding(code, "what", status, f"seen by {code}", f"mend {code}")


WELL = (finding("AMP101", Status.OK), finding("AMP102", Status.WARN), finding("AMP103", Status.UNKNOWN))
ILL = (*WELL, finding("AMP201", Status.FAIL), finding("AMP202", Status.FAIL))


def test_the_doctor_stops_the_start(start, release):
    status, err, called, seen = start(findings=ILL)
    assert (status, called) == (1, []) and seen == [("a100-80g-x8-tp8", str(release))]
    assert "error: AMP201 what: seen by AMP201\nhint: mend AMP201\n" in err
    assert err.splitlines()[-2] == "error: the doctor found what would stop the server: AMP201, AMP202"
    assert "--skip-doctor" in err.splitlines()[-1]


def test_the_server_starts_where_nothing_fails(start, release, monkeypatch):
    monkeypatch.setenv("KEPT", "as it was")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "20,20")
    _, err, [(program, command, environment)], seen = start("--", "--host", "127.0.0.1", findings=WELL)
    assert len(seen) == 1 and "warning: AMP102 what: seen by AMP102\nhint: mend AMP102\n" in err
    assert "AMP101" not in err and "AMP103" not in err and "starting vllm serve: TP8xPP1, room for" in err
    assert program == command[0] == sys.executable and command[-2:] == ["--host", "127.0.0.1"]
    assert environment["KEPT"] == "as it was" and "VLLM_PP_LAYER_PARTITION" not in environment
    assert environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"


def test_skipping_the_doctor(start):
    _, err, called, seen = start("--skip-doctor", findings=ILL)
    assert len(called) == 1 and seen == [] and "AMP2" not in err


def test_without_vllm_nothing_is_started(start, monkeypatch):
    def none(given):
        raise PatchError("no vLLM is installed for this Python")

    monkeypatch.setattr(tree, "locate", none)
    status, err, called, seen = start()
    assert (status, called, seen) == (1, [], []) and "no vLLM is installed" in err
