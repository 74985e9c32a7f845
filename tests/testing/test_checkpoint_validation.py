# SPDX-License-Identifier: Apache-2.0
"""Each way in which a checkpoint can be unusable ends in one line that names it."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm.ampere.checkpoint import INDEX, inspect
from vllm.ampere.errors import CheckpointError
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.tensor_table import expected_tensors, shard_key, text_tensors
from vllm.ampere.testing import tiny_checkpoint, tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]
RELEASED = json.loads(Path(__file__).with_name("released_config.json").read_text())
# One small shard of each kind, and an engram.
SMALL = {"engram_vocab_size": 100, "engram_n_heads": 2, "n_routed_experts": 6, "dspark_n_routed_experts": 3}


def test_released_table():
    """The published size of the release: tensors, bytes and shards."""
    table = list(expected_tensors(RELEASED))
    assert len(table) == len({spec.name for spec in table}) == 96_085
    assert sum(spec.nbytes for spec in table) == 510_286_023_000
    keys = [shard_key(spec.name) for spec in table]
    assert keys == sorted(keys) and len(set(keys)) == 48


def test_text_tensors_are_all_but_the_tower():
    table = list(expected_tensors(RELEASED))
    tower = [spec for spec in table if spec.name.startswith(("vision.", "aligner.", "image_"))]
    assert table == tower + list(text_tensors(ModelSpec.from_config(RELEASED)))
    assert len(tower) == 32 * 8 + 10


@pytest.mark.parametrize("prefix, count", [
    ("layers.0.", 2334), ("layers.1.", 2340), ("layers.2.", 2342), ("layers.3.", 2334), ("layers.14.", 2348),
    ("layers.20.", 2341), ("layers.24.", 2337), ("layers.39.", 2334),
])
def test_released_tensors_of_a_layer(prefix, count):
    assert sum(spec.name.startswith(prefix) for spec in expected_tensors(RELEASED)) == count


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("checkpoint") / "whole", "sharp", **SMALL)


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to spoil: the files are hard links, replaced and not edited."""
    return Path(shutil.copytree(whole, tmp_path / "copy", copy_function=os.link))


def replace(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        inspect(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder}: ") and "\n" not in message + caught.value.hint
    assert caught.value.hint, "no hint"
    return caught.value


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def edit_config(folder: Path, **text) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= text
    replace(folder / "config.json", json.dumps(config).encode())


def edit_tensors(folder: Path, name: str, edit) -> None:
    """Apply `edit` to the dict of the tensors that share a shard with `name`."""
    file = shard_of(folder, name)
    tensors = {key: value.clone() for key, value in load_file(file).items()}
    edit(tensors)
    file.unlink()
    save_file(tensors, file)


def test_whole(folder):
    report = inspect(folder)
    table = {spec.name: spec for spec in expected_tensors(json.loads((folder / "config.json").read_text()))}
    assert {name: tensor.spec for name, tensor in report.tensors.items()} == table
    assert report.classes_checked and report.spec.num_hidden_layers == 8
    assert report.tensor_bytes == json.loads((folder / INDEX).read_text())["metadata"]["total_size"]
    stored = report.tensors["layers.3.attn.attn_sink"]
    raw = (folder / stored.file).read_bytes()[stored.offset_bytes:][: stored.spec.nbytes]
    value = load_file(folder / stored.file)[stored.spec.name]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32), value)


def test_one_file_without_index(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / "model.safetensors")
    assert len(inspect(folder).tensors) == len(tensors)


def test_no_folder(tmp_path):
    assert "no such folder" in str(refusal(tmp_path / "absent"))
    (tmp_path / "file").write_text("x")
    assert "is a file" in str(refusal(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert "is empty" in str(refusal(tmp_path / "empty"))
    (tmp_path / "empty" / "readme").write_text("x")
    assert "no config.json" in str(refusal(tmp_path / "empty"))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_config_is_not_json(folder, content):
    replace(folder / "config.json", content)
    assert "config.json is not a JSON object" in str(refusal(folder))


@pytest.mark.parametrize("architecture, model_type", [
    ("DeepseekV4ForCausalLM", "deepseek_v4"), ("DeepseekV32ForCausalLM", "deepseek_v32"), ("LlamaForCausalLM", "llama"),
])
def test_another_model(folder, architecture, model_type):
    replace(folder / "config.json", json.dumps({"architectures": [architecture], "model_type": model_type}).encode())
    error = refusal(folder)
    assert architecture in str(error) and "DeepseekV41ForCausalLM" in str(error)
    assert "DeepSeek-V4.1" in error.hint


@pytest.mark.parametrize("text, words", [
    ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1]}, "compress_ratios has 8 entries, must have 8 + 3"),
    ({"compress_ratios": [0, 0, 2, 2, 1, 1, 1, 4, 0, 0, 0]}, r"compress_ratios holds [4]"),
    ({"compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0]}, "layer 1 has no KV source"),
    ({"compress_ratios": [0, 0, 2, 1, 1, 1, 1, 1, 0, 0, 0]}, "layer 3 has compress ratio 1"),
    ({"index_source_layer_ids": [4, 6]}, "[2] are not in index_source_layer_ids"),
    ({"engram_num_embeddings": [10, 10]}, "engram table of layer 1 has 10 rows"),
    ({"engram_compressed_vocab_size": 77}, "token classes, config.json says 77"),
    ({"moe_intermediate_size": 256}, "must be I8 [256, 128]"),
    ({"num_hidden_layers": "eight"}, "num_hidden_layers is 'eight', must be an integer"),
])
def test_config_does_not_fit(folder, text, words):
    edit_config(folder, **text)
    assert words in str(refusal(folder))


def test_engram_table_is_too_small(folder):
    """The stored table, where config.json is right."""
    name = "layers.3.engram.embed.weight"
    edit_tensors(folder, name, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    rows = json.loads((folder / "config.json").read_text())["text_config"]["engram_num_embeddings"][1]
    assert f"is F8_E4M3 [{rows - 1}, 256], must be F8_E4M3 [{rows}, 256]" in str(refusal(folder))


def test_missing_shard(folder):
    shards = sorted(folder.glob("*.safetensors"))
    shards[3].unlink()
    assert f"shard {shards[3].name} of 15 is missing" in str(refusal(folder))
    shards[5].unlink()
    assert f"shard {shards[3].name} and 1 more of 15 is missing" in str(refusal(folder))


def test_no_index(folder):
    (folder / INDEX).unlink()
    assert INDEX in str(refusal(folder))
    (folder / INDEX).write_text('{"weight_map": {}}')
    assert "no weight_map" in str(refusal(folder))


@pytest.mark.parametrize("keep, words", [
    (-1, "truncated: 1 of its"), (-1000, "truncated: 1000 of its"), (100, "end inside the header"), (3, "end inside"),
    (0, "end inside"),
])
def test_truncated_shard(folder, keep, words):
    file = shard_of(folder, "layers.4.attn.wkv.weight")
    whole = file.read_bytes()
    replace(file, whole[:keep])
    message = str(refusal(folder))
    assert file.name in message and words in message


def test_longer_shard(folder):
    file = shard_of(folder, "norm.weight")
    replace(file, file.read_bytes() + b"\0" * 8)
    assert f"{file.name} is 8 bytes longer" in str(refusal(folder))


def header(content) -> bytes:
    raw = json.dumps(content).encode()
    return len(raw).to_bytes(8, "little") + raw


@pytest.mark.parametrize("content", [
    b"\xff" * 64,
    (40).to_bytes(8, "little") + b"x" * 60,
    header([1, 2]),
    header({"norm.weight": {"dtype": "BF16", "shape": [4]}}),
    header({"norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 4]}}) + b"\0" * 4,
    header({"norm.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]}}) + b"\0" * 16,
    header({"norm.weight": {"dtype": "Q3", "shape": [4], "data_offsets": [0, 8]}}) + b"\0" * 8,
    header({"norm.weight": {"dtype": "BF16", "shape": [[4]], "data_offsets": [0, 8]}}) + b"\0" * 8,
    header({"norm.weight": 7}),
], ids=["length", "text", "list", "no-offsets", "size", "gap", "dtype", "shape", "number"])
def test_garbled_header(folder, content):
    file = shard_of(folder, "norm.weight")
    replace(file, content)
    assert f"{file.name} has no valid safetensors header" in str(refusal(folder))


def test_git_lfs_pointer(folder):
    file = shard_of(folder, "norm.weight")
    replace(file, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    error = refusal(folder)
    assert f"{file.name} is a Git LFS pointer" in str(error) and "git lfs pull" in error.hint


def test_index_names_an_absent_tensor(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["layers.0.attn.wq_c.weight"] = shard_of(folder, "norm.weight").name
    replace(folder / INDEX, json.dumps(index).encode())
    assert "the index names tensor layers.0.attn.wq_c.weight" in str(refusal(folder))


def test_tensors_of_the_wrong_kind(folder):
    name = "layers.2.attn.kv_norm.weight"
    edit_tensors(folder, name, lambda t: t.update({name: t[name].float()}))
    assert f"tensor {name} in {shard_of(folder, name).name} is F32 [512], must be BF16 [512]" in str(refusal(folder))
    edit_tensors(folder, name, lambda t: t.update({name: t[name][:-1].bfloat16()}))
    assert "is BF16 [511], must be BF16 [512]" in str(refusal(folder))


def test_missing_unknown_and_double_tensors(folder):
    index = json.loads((folder / INDEX).read_text())
    name = "layers.5.ffn.gate.bias"
    edit_tensors(folder, name, lambda t: t.pop(name))
    del index["weight_map"][name]
    replace(folder / INDEX, json.dumps(index).encode())
    assert f"tensor {name} is missing" in str(refusal(folder))
    more = {name: torch.zeros(6), "layers.5.x": torch.zeros(1)}
    edit_tensors(folder, "layers.5.ffn.gate.weight", lambda t: t.update(more))
    assert "tensor layers.5.x in" in str(refusal(folder))
    edit_tensors(folder, "layers.5.ffn.gate.weight", lambda t: t.update({"norm.weight": t.pop("layers.5.x")}))
    assert "tensor norm.weight is both in" in str(refusal(folder))


def test_tokenizer(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"][-1]["content"] = "<|User|>"  # normalises to the text of another marker
    replace(file, json.dumps(content).encode())
    assert "token classes, config.json says" in str(refusal(folder))
    replace(file, b"{}")
    assert "tokenizer.json cannot be read" in str(refusal(folder))
    file.unlink()
    assert "no tokenizer.json" in str(refusal(folder))


def test_unreadable_file(folder, monkeypatch):
    target = shard_of(folder, "norm.weight")
    real = Path.open

    def deny(self, *args, **kwargs):
        if self == target:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)
    assert "Permission denied" in str(refusal(folder))


def test_plain_python_is_enough(whole):
    """Without torch, vLLM or tokenizers: an interpreter that sees this repository and the standard library."""
    script = (f"from vllm.ampere.checkpoint import inspect; report = inspect({str(whole)!r}); "
              "print(len(report.tensors), report.classes_checked)")
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, cwd=REPOSITORY,
                          env={"PYTHONPATH": str(REPOSITORY)}, timeout=60)
    assert done.stdout.split() == [str(len(inspect(whole).tensors)), "False"], done.stderr


def test_the_release(tmp_path):
    """All 48 headers of the release, over sparse files in place of the 475 GiB."""
    weight_map = {}
    shards = itertools.groupby(expected_tensors(RELEASED), lambda spec: shard_key(spec.name))
    for number, (_, specs) in enumerate(shards, 1):
        file, offset, content = tmp_path / f"model-{number:05d}-of-00048.safetensors", 0, {}
        for spec in specs:
            end = offset + spec.nbytes
            content[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [offset, end]}
            offset = end
            weight_map[spec.name] = file.name
        file.write_bytes(header(content))
        os.truncate(file, file.stat().st_size + offset)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(RELEASED))
    tiny_tokenizer.deepseek().save(str(tmp_path / "tokenizer.json"))
    report = inspect(tmp_path)
    assert report.tensor_bytes == 510_286_023_000 and report.classes_checked
