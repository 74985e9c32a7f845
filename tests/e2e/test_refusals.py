# SPDX-License-Identifier: Apache-2.0
"""Bad input over the real command line: one clear line, a hint and a non-zero exit, and never a hung server."""

import json
import shutil
from pathlib import Path

import pytest
import vllm

from vllm.ampere.testing.engine import OPTIONS, run, serve_command

from .scenarios import prompt

pytestmark = pytest.mark.vllm
LIMIT_S = 120
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def serve(session, tmp_path):
    """Runs `vllm serve` of a checkpoint that it must refuse; returns its error line and its hint."""

    def refused(checkpoint, env=None):
        with session.timed("refusals"):
            ended = run(serve_command(checkpoint, OPTIONS), tmp_path / "serve.log", LIMIT_S, env)
        assert ended.code is not None, f"still running after {LIMIT_S} s:\n{ended.output[-3000:]}"
        assert ended.code != 0, ended.output[-3000:]
        assert "Traceback" not in ended.output, ended.output[-3000:]
        error, hint = [line for line in ended.output.splitlines() if line.strip()][-2:]
        assert error.startswith("error: ") and hint.startswith("hint: "), ended.output[-3000:]
        return error, hint

    return refused


@pytest.fixture
def copy(session, tmp_path):
    """A copy of the sharp checkpoint to spoil."""
    return Path(shutil.copytree(session.checkpoint("sharp"), tmp_path / "checkpoint"))


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
         "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 512,
         "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("architecture, config", [
    ("DeepseekV4ForCausalLM", {"model_type": "deepseek_v4"}),
    ("DeepseekV32ForCausalLM", {"model_type": "deepseek_v32"}),
    ("LlamaForCausalLM", LLAMA),
])
def test_another_model(serve, copy, architecture, config):
    (copy / "config.json").write_text(json.dumps(LLAMA | {"architectures": [architecture]} | config))
    error, _ = serve(copy)
    assert architecture in error and "DeepSeek-V4.1" in error


def test_missing_shard(serve, copy):
    shard = sorted(copy.glob("*.safetensors"))[3]
    shard.unlink()
    error, _ = serve(copy)
    assert shard.name in error


def test_truncated_shard(serve, copy):
    shard = sorted(copy.glob("*.safetensors"))[3]
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 1000)
    error, _ = serve(copy)
    assert shard.name in error


def test_compress_ratios_do_not_fit(serve, copy):
    edit_config(copy, lambda config: config["text_config"]["compress_ratios"].pop())
    error, _ = serve(copy)
    assert "compress_ratios" in error


def test_unpatched_tree(serve, session, tmp_path):
    """A copy of the installed vLLM, with the files of the series as upstream has them."""
    tree = tmp_path / "tree"
    tree.mkdir()
    shutil.copytree(Path(vllm.__file__).parent, tree / "vllm", copy_function=copy_or_link, symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__"))
    reverted = run([str(ROOT / "vllm_ampere.py"), "patches", "revert", str(tree)], tmp_path / "revert.log", LIMIT_S)
    assert reverted.code == 0, reverted.output
    error, hint = serve(session.checkpoint("sharp"), {"PYTHONPATH": str(tree)})
    assert "not patched" in error and "vllm-ampere patches apply" in hint


def copy_or_link(source, target):
    """Python files are copied, so that changing them leaves the installed ones alone; the rest is linked."""
    if source.endswith(".py"):
        shutil.copyfile(source, target)
    else:
        Path(target).symlink_to(source)


def test_prompt_past_the_limit(session):
    """An HTTP error, and the server goes on."""
    server = session.server("plain")
    status, answer = server.post("/v1/completions", {"model": str(session.checkpoint("sharp")), "prompt": prompt(3000), "max_tokens": 1})
    assert status == 400
    assert "2048" in answer["error"]["message"]
    assert len(server.complete(prompt(20), 2, logprobs=False).tokens) == 2
