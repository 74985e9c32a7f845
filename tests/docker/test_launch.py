# SPDX-License-Identifier: Apache-2.0
"""The launch scripts, with a docker that only says how it was called: its options, and what the container would serve."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.planner.hollow import write_hollow
from tests.repo.checkout import ROOT
from vllm.ampere import nodes
from vllm.ampere.cli import main as cli
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner import presets
from vllm.ampere.testing import tiny_tokenizer

FOLDER = ROOT / "docker" / "launch"
SCRIPTS = {
    "tp8": "a100-80g-x8-tp8",
    "tp4-pp2": "a800-80g-x8-tp4-pp2",
    "tp2-pp3": "ga100-64g-x6-tp2-pp3",
    "tp8-pp2-two-node": "a800-40g-x16-tp8-pp2",
}
SECOND = {"NODE_RANK": "1", "MASTER_ADDR": "192.0.2.5"}
FAKE = """#!/bin/sh
printf '%s\\0' "$@" > "$SAID"
env > "$SAID.env"
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The released checkpoint with holes for its values, in a folder with a name that shells stumble over."""
    folder = tmp_path_factory.mktemp("it's a model")
    write_hollow(folder, ModelSpec(), tiny_tokenizer.deepseek().to_str())
    return folder


@pytest.fixture
def launch(tmp_path):
    """Run a script; returns its exit status, what docker was called with (None if it was not), and stderr."""
    (tmp_path / "bin").mkdir()
    docker, said = tmp_path / "bin" / "docker", tmp_path / "said"
    docker.write_text(FAKE)
    docker.chmod(0o755)

    def run(script, *words, **variables):
        said.unlink(missing_ok=True)
        environment = {"PATH": f"{docker.parent}:{os.environ['PATH']}", "SAID": str(said), **variables}
        command = [FOLDER / f"{script}.sh", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
        called = said.read_text().split("\0")[:-1] if said.exists() else None
        return done.returncode, called, done.stderr

    return run


def split(called, image="vllm-ampere"):
    """Options of `docker run`, and the words that the image is given."""
    place = called.index(image)
    assert called[0] == "run"
    return called[1:place], called[place + 1 :]


def test_every_script_is_here():
    assert {path.stem for path in FOLDER.glob("*.sh")} == {*SCRIPTS, "container"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_container_serves_the_preset(launch, release, capsys, monkeypatch, script):
    """The words for the image, run as the image runs them: they plan the preset, for the checkpoint at /model."""
    preset = presets.load(SCRIPTS[script])
    count = preset.inventory.nodes
    status, called, _ = launch(script, release, "--", "--seed", "7", **(SECOND if count > 1 else {}))
    options, words = split(called)
    assert status == 0 and words[:4] == ["serve", "/model", "--preset", SCRIPTS[script]]
    assert f"type=bind,source={release},target=/model,readonly" in options
    monkeypatch.setattr(nodes, "towards", lambda master, rank: nodes.Interface("ib0", "192.0.2.6"))
    for name in ("GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    place = words.index("--")
    own = [str(release) if word == "/model" else word for word in words[:place]]
    status = cli.main([*own, "--dry-run", "--format", "json", *words[place:]])
    out, err = capsys.readouterr()
    assert status == 0, err
    document = json.loads(out)
    found = document["command"]
    layout = preset.layout
    for flag, value in (
        ("--tensor-parallel-size", layout.tensor), ("--pipeline-parallel-size", len(layout.partition)),
        ("--max-model-len", preset.serving.context), ("--max-num-seqs", preset.serving.requests), ("--seed", 7),
    ):
        assert found[found.index(flag) + 1] == str(value)
    assert ("--nnodes" in found) == (count > 1) == ("--network" in options)
    cuts = ",".join(map(str, layout.partition)) if len(layout.partition) > 1 else None
    assert document["environment"].get("VLLM_PP_LAYER_PARTITION") == cuts


def test_options_of_the_container(launch, release):
    options, _ = split(launch("tp8", release)[1])
    assert options == [
        "--rm", "--gpus", "all", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864", "--ipc=host",
        "--mount", f"type=bind,source={release},target=/model,readonly", "--volume", "vllm-ampere-cache:/cache",
        "--publish", "127.0.0.1:8000:8000",
    ]


def test_options_from_the_environment(launch, release):
    asked = {"SHM_SIZE": "256g", "GPUS": '"device=0,1"', "ADDRESS": "192.0.2.5", "PORT": "9000", "IMAGE": "mine:1",
             "CACHE": "/var/cache/ampere", "VLLM_API_KEY": "secret", "NCCL_DEBUG": "INFO", "PRESET": "a6000-48g-x8-tp4-pp2",
             "GLOO_SOCKET_IFNAME": "ib0"}
    options, words = split(launch("tp4-pp2", release, **asked)[1], "mine:1")
    pairs = list(zip(options, options[1:]))
    for pair in (("--shm-size", "256g"), ("--gpus", '"device=0,1"'), ("--publish", "192.0.2.5:9000:8000"),
                 ("--volume", "/var/cache/ampere:/cache"), ("--env", "VLLM_API_KEY"), ("--env", "NCCL_DEBUG"),
                 ("--env", "GLOO_SOCKET_IFNAME")):
        assert pair in pairs
    assert "--ipc=host" not in options and options.count("--env") == 3
    assert "secret" not in " ".join([*options, *words])  # by name only: a command line can be read by everybody
    assert words == ["serve", "/model", "--preset", "a6000-48g-x8-tp4-pp2"]


def test_two_nodes_share_the_network_of_their_hosts(launch, release):
    called = {rank: split(launch("tp8-pp2-two-node", release, NODE_RANK=rank, MASTER_ADDR="192.0.2.5")[1]) for rank in "01"}
    for rank, (options, words) in called.items():
        assert ("--network", "host") in zip(options, options[1:]) and "--publish" not in options
        assert words[4:] == ["--node-rank", rank, "--master-addr", "192.0.2.5"]
        assert ("--device" in options) == Path("/dev/infiniband").exists()


def test_arguments_reach_the_server_whole(launch, release):
    given = ["--context", "256K", "--", "--chat-template", "it's a $HOME of \"quotes\" and\nlines"]
    assert split(launch("tp8", release, *given)[1])[1][4:] == given


@pytest.mark.parametrize("script, words, variables, message", [
    ("tp8", (), {}, "no checkpoint is named"),
    ("tp8", ("--dry-run",), {}, "no checkpoint is named"),
    ("tp8", ("nowhere",), {}, "nowhere is not a folder"),
    ("tp8", (FOLDER / "tp8.sh",), {}, "tp8.sh is not a folder"),
    ("tp8-pp2-two-node", (FOLDER,), {"NODE_RANK": "0"}, "NODE_RANK and MASTER_ADDR are needed"),
    ("tp8-pp2-two-node", (FOLDER,), {"MASTER_ADDR": "192.0.2.5"}, "NODE_RANK and MASTER_ADDR are needed"),
])
def test_mistakes_are_one_line_and_a_hint(launch, script, words, variables, message):
    status, called, err = launch(script, *words, **variables)
    error, hint = err.splitlines()
    assert (status, called) == (2, None)
    assert error.startswith("error: ") and message in error and hint.startswith("hint: ")


def test_links_out_of_the_folder(launch, tmp_path):
    """As a download cache keeps them: the container would see the links, and not what they lead to."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    (blobs / "a").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "a")
    status, called, err = launch("tp8", snapshot)
    assert (status, called) == (2, None) and f"links to {blobs / 'a'}" in err and "--local-dir" in err
    (snapshot / "config.json").unlink()
    (snapshot / "b").write_text("{}")
    (snapshot / "config.json").symlink_to("b")
    assert launch("tp8", snapshot)[0] == 0


def test_without_docker(launch, release, tmp_path):
    (tmp_path / "bin" / "docker").unlink()
    (tmp_path / "tools").mkdir()
    for tool in ("bash", "dirname", "env"):
        (tmp_path / "tools" / tool).symlink_to(Path("/usr/bin") / tool)
    status, _, err = launch("tp8", release, PATH=str(tmp_path / "tools"))
    assert status == 2 and "error: docker is not installed" in err
