# SPDX-License-Identifier: Apache-2.0
import errno
import filecmp
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from vllm.ampere.checkpoint import inspect
from vllm.ampere.errors import CheckpointError, UsageError
from vllm.ampere.testing import tiny_checkpoint, tiny_tokenizer
from vllm.ampere.testing.tiny_checkpoint import write
from vllm.ampere.testing.tiny_config import PRESETS
from vllm.ampere.testing.tiny_weights import _pack_e2m1

RELEASED = json.loads(Path(__file__).with_name("released_config.json").read_text())
SMALL = {"engram_vocab_size": 100, "engram_n_heads": 2, "n_routed_experts": 6, "dspark_n_routed_experts": 3}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}
    return found


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """E2M1 codes, the low half of each byte first."""
    packed = packed.view(torch.uint8).int()
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset(home, preset):
    """Valid by the table, small, and nested and cut as the release is."""
    folder = write(home / preset, preset)
    report = inspect(folder)
    assert report.classes_checked
    assert report.tensor_bytes <= 2**20 * (320 if report.spec.vocab_size == 129_280 else 60)
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == RELEASED.keys()
    for section in ("text_config", "vision_config", "quantization_config"):
        assert config[section].keys() == RELEASED[section].keys()
    assert config["quantization_config"] == RELEASED["quantization_config"]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.tensor_bytes
    assert {tensor.file for tensor in report.tensors.values()} == {file.name for file in folder.glob("*.safetensors")}
    vision, layers, stages, engrams = report.spec.vision_layers > 0, 8, 3, 2
    assert len(set(index["weight_map"].values())) == vision + 1 + layers + 1 + stages + engrams
    # Tensor parallel 2: whole heads, groups, vocabulary rows and quantisation tiles on each rank.
    spec = report.spec
    for size in (spec.num_attention_heads, spec.o_groups, spec.vocab_size, spec.moe_intermediate_size // 32):
        assert size % 2 == 0


def test_kinds_of_layers(home):
    """The sharp checkpoint has every kind of layer of the release."""
    spec = inspect(write(home / "sharp", "sharp")).spec
    kinds = {(x.ratio, x.owns_kv, x.owns_index, x.candidates, x.engram is not None) for x in spec.layers}
    assert kinds >= {
        (0, False, False, "", False), (0, False, False, "", True), (2, True, True, "", False),
        (2, False, False, "", True), (1, True, True, "source", False), (1, False, True, "masked", False),
        (1, False, False, "", False),
    }
    candidates = spec.candidate_topk_blocks * spec.candidate_block_size
    assert (spec.index_topk, candidates, spec.sliding_window) == (64, 128, 128)


def test_sizes_for_gpu_kernels(home):
    spec = inspect(write(home / "wide_topk", "wide_topk")).spec
    assert spec.index_topk == 512 and spec.hidden_size % 256 == 0 and spec.moe_intermediate_size % 256 == 0
    assert spec.q_lora_rank % 128 == 0 and spec.o_lora_rank % 128 == 0


def test_same_arguments_same_bytes(tmp_path):
    one, two, other = (write(tmp_path / name, "sharp", seed, **SMALL) for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    names = sorted(file.name for file in one.iterdir())
    assert names == sorted(file.name for file in two.iterdir())
    assert filecmp.cmpfiles(one, two, names, shallow=False) == (names, [], [])
    shards = [name for name in names if name.endswith(".safetensors")]
    assert filecmp.cmpfiles(one, other, shards, shallow=False)[1] == shards


def test_values(tmp_path):
    """Finite, spread as asked, scales that vary and use the whole range of the codes."""
    found = tensors(write(tmp_path / "a", "sharp", **SMALL))
    for name, value in found.items():
        if value.dtype == torch.float8_e8m0fnu:
            exponent = value.view(torch.uint8).int() - 127
            assert -20 < exponent.min() and exponent.max() < 20, name
            if value.numel() > 16:
                assert len(exponent.unique()) >= 3, f"{name} hardly varies: a scale from the wrong place would not show"
        elif value.dtype != torch.int8:
            assert value.float().isfinite().all() and value.float().std() > 0, name
    codes, scale = found["layers.0.attn.wq_b.weight"].double(), found["layers.0.attn.wq_b.scale"].double()
    tiles = codes.abs().unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).amax((1, 3))
    assert ((tiles >= 224) & (tiles <= 448)).all(), "not the smallest power of two"
    weight = codes * scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert weight.std().item() == pytest.approx(1.2 / 64**0.5, rel=0.05)
    codes, scale = unpack(found["layers.0.ffn.experts.1.w1.weight"]), found["layers.0.ffn.experts.1.w1.scale"].double()
    weight = E2M1[codes] * scale.repeat_interleave(32, 1)
    assert (E2M1[codes].abs().unflatten(1, (-1, 32)).amax(-1) >= 3).all(), "not the smallest power of two"
    assert weight.std().item() == pytest.approx(1.2 / 256**0.5, rel=0.05)
    assert found["layers.3.ffn.gate.bias"].std() > 2
    codes, scale = (found[f"layers.1.engram.embed.{part}"].double() for part in ("weight", "scale"))
    assert 0.5 < (codes * scale.repeat_interleave(32, 1)).std() < 2


def test_pack_e2m1():
    """The nearest code; the even column is in the low half of the byte."""
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).mul(3).clamp(-6, 6)
    decoded = E2M1[unpack(_pack_e2m1(values))]
    nearest = (values.double()[..., None] - E2M1).abs().amin(-1)
    assert torch.equal((decoded - values.double()).abs(), nearest)


def test_drafts_of_the_parrot(tmp_path):
    """Its Markov head names the token that the target's head names for the last token's embedding."""
    found = tensors(write(tmp_path / "a", "parrot", **SMALL))
    embed, norm, head = (found[f"{name}.weight"].float() for name in ("embed", "norm", "head"))
    target = torch.nn.functional.rms_norm(embed, (256,), norm) @ head.T
    embed, head = (found[f"mtp.2.markov_head.{name}.weight"].float() for name in ("embed", "head"))
    assert (target.argmax(-1) == (embed @ head.T).argmax(-1)).float().mean() > 0.98


def test_overrides(tmp_path):
    folder = write(tmp_path / "a", "sharp", **SMALL, index_topk=32, engram_layer_ids=[], routing_bias_std=0.2)
    spec = inspect(folder).spec
    assert spec.index_topk == 32 and spec.engram_layer_ids == ()
    assert tensors(tmp_path / "a")["layers.0.ffn.gate.bias"].abs().max() < 1
    with pytest.raises(UsageError, match="no setting 'index_top'"):
        write(tmp_path / "b", "sharp", index_top=3)
    with pytest.raises(UsageError, match="no tiny checkpoint is called 'blunt'"):
        write(tmp_path / "b", "blunt")
    with pytest.raises(CheckpointError, match="compress_ratios has 2 entries"):
        write(tmp_path / "b", "sharp", compress_ratios=[0, 0])
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def inode(folder: Path) -> int:
    return (folder / "config.json").stat().st_ino


def test_written_once(tmp_path):
    folder = write(tmp_path / "deep" / "a", "sharp", **SMALL)
    before = inode(folder)
    assert inode(write(folder, "sharp", **SMALL)) == before
    spoilt = folder / "model-00003-of-00015.safetensors"
    spoilt.write_bytes(spoilt.read_bytes()[:-5])
    assert inode(write(folder, "sharp", **SMALL)) != before, "a damaged checkpoint was taken for whole"
    before = inode(folder)
    assert inode(write(folder, "sharp", 1, **SMALL)) != before, "another seed's checkpoint was kept"
    inspect(folder)
    assert [file.name for file in folder.parent.iterdir()] == ["a"]


def test_writers_at_once(tmp_path, monkeypatch):
    """They wait for each other: nobody fails, writes twice, or sees another's half."""
    filled = []

    def fill(folder, recipe, seed):
        filled.append(seed)
        assert not any(folder.iterdir()), "two writers in one folder"
        (folder / "config.json").write_text(str(seed))

    monkeypatch.setattr(tiny_checkpoint, "_fill", fill)
    with ThreadPoolExecutor(4) as threads:
        for path in (tmp_path / str(number) for number in range(50)):
            filled.clear()
            assert list(threads.map(lambda _: write(path, "sharp"), range(4))) == [path] * 4
            assert filled == [0]
        for _ in range(50):
            given = [seed % 2 for seed in range(4)]
            assert list(threads.map(lambda seed: write(path, "sharp", seed), given)) == [path] * 4
            assert (path / "config.json").read_text() in "01"
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(map(str, range(50)))


def test_foreign_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("mine")
    (tmp_path / "b").write_text("mine")
    for name in "ab":
        with pytest.raises(CheckpointError, match="not a tiny checkpoint of ours") as caught:
            write(tmp_path / name, "sharp", **SMALL)
        assert caught.value.hint
    assert (tmp_path / "a" / "thesis.tex").read_text() == (tmp_path / "b").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    inspect(write(tmp_path / "empty", "sharp", **SMALL))


def fail_at(monkeypatch, number: int, error: BaseException) -> None:
    """The write of the `number`th shard fails."""
    calls = []
    real = Path.write_bytes

    def write_bytes(self, content):
        calls.append(self)
        if len(calls) == number:
            real(self, content[: len(content) // 2])
            raise error
        return real(self, content)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)


@pytest.mark.parametrize("error, raised, message", [
    (OSError(errno.ENOSPC, "No space left on device"), CheckpointError, "No space left on device"),
    (OSError(errno.EIO, "Input/output error"), CheckpointError, "Input/output error"),
    (KeyboardInterrupt(), KeyboardInterrupt, None),
])
def test_interrupted(tmp_path, monkeypatch, error, raised, message):
    """Nothing is left of a first write, and the older checkpoint of a second."""
    for older in (False, True):
        with monkeypatch.context() as patch:
            fail_at(patch, 3, error)
            with pytest.raises(raised, match=message) as caught:
                write(tmp_path / "a", "sharp", 1, **SMALL)
        if raised is CheckpointError:
            assert "\n" not in str(caught.value) and caught.value.hint
        assert [file.name for file in tmp_path.iterdir()] == ["a"] * older
        write(tmp_path / "a", "sharp", 0, **SMALL)
        inspect(tmp_path / "a")


def test_leftover_of_a_killed_writer(tmp_path):
    """A power cut leaves the partial folder, which never has the checkpoint's name; the next writer takes it over."""
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "model-00099-of-00099.safetensors").write_bytes(b"half")
    folder = write(tmp_path / "a", "sharp", **SMALL)
    assert not (folder / "model-00099-of-00099.safetensors").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("make, size", [(tiny_tokenizer.tiny, 512), (tiny_tokenizer.deepseek, 129_280)])
def test_tokenizer(make, size):
    tokenizer: Tokenizer = make()
    assert tokenizer.get_vocab_size() == size and all(tokenizer.id_to_token(i) is not None for i in range(size))
    assert [tokenizer.token_to_id(t) for t in (tiny_tokenizer.BOS, tiny_tokenizer.EOS, tiny_tokenizer.PAD)] == [0, 1, 2]
    for marker in tiny_tokenizer.MARKERS:
        assert tokenizer.encode(marker, add_special_tokens=False).ids == [tokenizer.token_to_id(marker)]
    text = "The café\n\n is  open 24/7: 北京 🙂 naïve\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the of and The of AND").ids) == (9 if size == 512 else 6)


def test_tokenizer_package_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny_tokenizer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="DeepSeek's tokenizer is not installed") as caught:
        write(tmp_path / "a", "demo")
    assert "pip install" in caught.value.hint and not any(tmp_path.iterdir())


@pytest.mark.vllm
@pytest.mark.parametrize("preset", ["sharp", "demo"])
def test_chat_encoding(home, preset):
    """vLLM's V4.1 encoder writes each marker as one token, and in the demo with the release's ids."""
    from vllm.tokenizers.deepseek_v41 import DeepseekV41Tokenizer

    tokenizer = DeepseekV41Tokenizer.from_pretrained(str(write(home / preset, preset)))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(chat)
    marks = [tiny_tokenizer.BOS, tiny_tokenizer.SYSTEM, "<｜User｜>", "<｜Assistant｜>", "<think>"]
    assert [tokenizer.convert_ids_to_tokens(i) for i in ids if tokenizer.convert_ids_to_tokens(i) in marks] == marks
    if preset == "demo":
        from vllm.models.deepseek_v41.common.mm_preprocess import validate_image_sentinel_ids

        validate_image_sentinel_ids(tokenizer)
        assert [i for i in ids if i >= 128_000 or i < 3] == [0, 128_799, 128_803, 128_804, 128_821]


@pytest.mark.vllm
def test_config_as_vllm_reads_it(home):
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config

    config = DeepseekV41Config.from_pretrained(write(home / "vision", "vision"))
    assert (config.index_topk, config.hidden_size, config.expert_dtype, config.vision_n_layers) == (64, 256, "fp4", 2)
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 16
