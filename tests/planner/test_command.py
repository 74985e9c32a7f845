# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere plan` in process: what it prints, and one line and a hint for every mistake."""

import json
import math
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.planner.hollow import write_hollow
from vllm.ampere.cli import main as cli
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner import presets
from vllm.ampere.planner.pipeline import crossing_bytes

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def plan(capsys):
    def run(*words):
        status = cli.main(["plan", *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_table_of_one_layout(plan):
    status, out, err = plan("--preset", "a800-80g-x8-tp4-pp2")
    assert (status, err) == (0, "")
    rows = dict(line.rsplit(None, 2)[:1] + [line.rsplit(None, 2)[1:]] for line in out.splitlines()[1:26])
    assert rows["bytes of a block"] == ["138240", "114048"]
    assert rows["bytes of a token"] == ["1074", "716"]
    assert rows["layers"] == ["0-19", "20-39"]
    assert "188.8 GiB (264.0 without use_thp)" in out


def test_arguments_can_be_pasted(plan):
    status, out, _ = plan("--preset", "a800-40g-x16-tp8-pp2", "--format", "args")
    words = shlex.split(out)
    assert status == 0 and out.count("\n") == 1
    assert words[:4] == ["VLLM_PP_LAYER_PARTITION=20,20", "vllm", "serve", "MODEL"]
    assert json.loads(words[words.index("--engram-config") + 1]) == {"cpu_offload": True, "use_thp": True}


def test_the_best_layout_of_a_box(plan):
    status, out, _ = plan("--gpus", "8x80", "--no-draft", "--format", "json")
    assert status == 0
    best = json.loads(out)
    assert best["layout"] == {"tensor": 4, "partition": [20, 20], "expert_parallel": False}
    assert best["fits"] and best["kv"]["capacity_tokens"] > 1 << 20
    assert [stage["crossing_bytes_per_token"] for stage in best["stages"]] == [40_976, 0]


def test_all_layouts(plan):
    status, out, err = plan("--gpus", "6x64", "--all")
    assert status == 0
    lines = out.splitlines()
    assert any(line.startswith("TP2xPP3 ") and "8,12,20" in line and "lacks 23.59 GiB" in line for line in lines)
    assert re.search(r"^TP2xPP3 +14,14,12 .* 40976 50192 +28 .* ok$", out, re.M)
    assert re.search(r"^TP2xPP3 +13,14,13 .* 44048 52240 +13,27 ", out, re.M)
    assert any("TP6 cannot share 8 output groups" in line for line in lines)
    assert "verdict: " in err
    assert plan("--gpus", "8x80", "--all")[0] == 0


def test_presets_in_json(plan):
    status, out, _ = plan("--presets", "--format", "json")
    assert status == 0 and list(json.loads(out)) == presets.names()


def test_a_refused_layout_prints_no_arguments(plan):
    status, out, err = plan("--preset", "a100-80g-x4-tp4", "--format", "args")
    assert (status, out) == (1, "")
    assert err.startswith("error: a card with layers 0-39 lacks 3.70 GiB") and "hint: without the draft" in err


def test_a_relayed_cut(plan):
    status, out, err = plan("--gpus", "6x64", "--partition", "14,14,12")
    assert (status, err) == (0, "")
    assert re.search(r"^keeps a copy of layer +- +- +20$", out, re.M)
    assert re.search(r"^bytes of a token to the next stage +40976 +50192 +-$", out, re.M)
    document = json.loads(plan("--gpus", "6x64", "--partition", "14,14,12", "--format", "json")[1])
    assert [stage["copied_layer"] for stage in document["stages"]] == [None, None, 20]
    status, out, _ = plan("--preset", "ga100-64g-x6-tp2-pp3", "--format", "args")
    assert status == 0 and out.startswith("VLLM_PP_LAYER_PARTITION=14,14,12 vllm serve MODEL ")


def test_options_reach_the_plan(plan):
    preset = ("--preset", "a800-80g-x8-tp4-pp2", "--format", "json")
    changed = json.loads(plan(*preset, "--context", "256K", "--batched-tokens", 2048, "--no-images", "--no-draft")[1])
    assert changed["stages"][0]["weight_bytes"]["vision"] == 0
    assert changed["stages"][1]["weight_bytes"]["draft"] == 0
    whole = ("--partition", "20,20", "--expert-parallel")
    assert json.loads(plan(*preset, *whole)[1])["stages"][0]["weight_bytes"]["expert_padding"] == 0


def test_a_checkpoint_is_read_from_its_headers(plan, tmp_path):
    spec = ModelSpec(vision_layers=0, engram_layer_ids=(), engram_num_embeddings=(), moe_intermediate_size=256,
                     n_routed_experts=8, dspark_n_routed_experts=8)
    tensors = write_hollow(tmp_path, spec)
    status, out, err = plan("--model", tmp_path, "--gpus", "1x80", "--format", "json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    held = found["stages"][0]["weight_bytes"]
    experts = sum(t.nbytes for t in tensors if t.name.startswith("layers.") and ".ffn.experts." in t.name)
    assert held["experts"] == experts and held["vision"] == held["expert_padding"] == 0
    assert found["host_bytes"] == [0]


@pytest.mark.parametrize(
    "words, status, message",
    [
        (("--gpus", "8x"), 2, "'8x' is no set of cards"),
        (("--gpus", "0x80"), 2, "0x80: cards: Input should be greater than or equal to 1"),
        (("--preset", "a100"), 2, "there is no preset 'a100'"),
        (("--preset", "a100-80g-x8-tp8", "--link", "nvlink"), 2, "--link goes with --gpus"),
        (("--gpus", "8x80", "--link", "nvlnk"), 2, "there is no 'nvlnk'"),
        (("--gpus", "8x80", "--contxt", "1M"), 2, "there is no '--contxt'"),
        (("--gpus", "8x80", "--context", "lots"), 2, "--context 'lots' is no count"),
        (("--gpus", "8x80", "--context", "0"), 2, "--context '0' is no count"),
        (("--gpus", "8x80", "--context", "2M"), 2, "more than the model's 1048576"),
        (("--gpus", "8x80", "--partition", "20-20"), 2, "--partition '20-20' is no list of layers"),
        (("--gpus", "8x80", "--partition", "20,21"), 2, "partition 20,21 does not deal out 40 layers"),
        (("--gpus", "8x80", "--partition", "8,12,20"), 2, "8 cards cannot be dealt out over 3 stages"),
        (("--gpus", "8x80", "--expert-parallel"), 2, "--expert-parallel goes with --partition"),
        (("--gpus", "8x80", "--preset", "a100-80g-x8-tp8"), 2, "not allowed with argument"),
        (("--gpus", "8x80", "--all", "--format", "args"), 2, "--format args prints one layout"),
        (("--inventory", "nowhere.json"), 2, "cannot read nowhere.json"),
        (("--gpus", "8x80", "--model", __file__), 1, "this is a file, not a checkpoint folder"),
        (("--gpus", "8x80", "--model", "nowhere"), 1, "nowhere: there is no such folder"),
    ],
)
def test_mistakes_are_one_line_and_a_hint(plan, words, status, message):
    found, out, err = plan(*words)
    first, second, *rest = err.splitlines()
    assert (found, out, rest) == (status, "", [])
    assert first.startswith("error: ") and message in first and second.startswith("hint: ")


def test_without_pydantic(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    status, out, err = plan("--gpus", "8x80")
    assert (status, out) == (1, "") and "needs the package pydantic" in err


@pytest.mark.parametrize("words", ["--presets", "--splits"])
def test_the_guide_shows_what_the_planner_prints(plan, words):
    _, out, _ = plan(words)
    for language in ("en", "zh"):
        assert f"```\n{out}```" in (DOCS / language / "topologies.md").read_text()


def test_the_guide_shows_what_crosses():
    """The lines of bytes over the cuts, from the function that counts them."""
    def line(title, rows, kept=None):
        sizes = [crossing_bytes(ModelSpec(), cut, True, rows, kept if cut > 20 else None) for cut in (14, 28, 27)]
        units = [(size / 1e6, "MB") if size >= 1e6 else (size / 1e3, "KB") for size in sizes]
        return " ".join([title, *(f"{size:.{max(0, 2 - int(math.log10(size)))}f} {unit}" for size, unit in units)])

    lines = [
        line("decode, one request and its draft (6 rows)", 6),
        line("decode, 32 requests and theirs (192 rows)", 192),
        line("a chunk of 8,192 tokens, one long prompt", 8192, 128),
        line("the same, all rows kept (prompt log-probs)", 8192),
    ]
    for language in ("en", "zh"):
        text = re.sub(" +", " ", (DOCS / language / "topologies.md").read_text())
        assert "\n".join(lines) in text


def test_the_translated_guide_has_the_same_figures():
    """Section by section the same numbers of three characters and more; smaller ones may be written as words."""
    def figures(language):
        # A Chinese guide counts by ten thousands.
        text = re.sub(r"(\d+) 万", lambda m: f"{int(m[1]) / 100:g} million", (DOCS / language / "topologies.md").read_text())
        found = [re.findall(r"\d[\d,.]+\d", section) for section in text.split("\n## ")]
        return [{float(figure.replace(",", "")) for figure in section if figure.count(".") < 2} for section in found]

    assert figures("en") == figures("zh")
