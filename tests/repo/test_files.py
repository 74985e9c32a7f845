# SPDX-License-Identifier: Apache-2.0
"""Sizes, names, first lines, docstrings, and what no file may say."""

import ast
import re

import pytest

from tests.repo.checkout import ROOT, files, modules, tree

TEXT = [p for p in files() if p.name not in ("LICENSE",) and p.suffix not in (".png", ".svg", ".npz", ".safetensors")]
CODE = [
    p for p in TEXT if p.suffix in (".py", ".sh") or p.name in ("Makefile", "Dockerfile") or p == p.__class__(".ci/run")
]
BANNED = {"utils", "util", "common", "helpers", "helper", "misc", "new", "v2", "final", "fast", "turbo"}
HOSTS = {
    "github.com",
    "git-lfs.github.com",
    "huggingface.co",
    "download.pytorch.org",
    "www.apache.org",
    "arxiv.org",
    "docs.vllm.ai",
    "127.0.0.1",
    "localhost",
}
MACHINE = re.compile(
    r"(?<![\w.])/(?:root|home|work|Users|mnt|srv)/\w"
    r"|(?<!==)\b(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}\b(?!\.)"
)


@pytest.mark.parametrize("path", CODE, ids=str)
def test_length(path):
    assert len((ROOT / path).read_text().splitlines()) < 500


@pytest.mark.parametrize("path", CODE, ids=str)
def test_licence_line_comes_first(path):
    lines = (ROOT / path).read_text().splitlines()
    first = lines[1] if lines[0].startswith("#!") else lines[0]
    assert first == "# SPDX-License-Identifier: Apache-2.0"


@pytest.mark.parametrize("path", files(), ids=str)
def test_name_says_what_is_in_it(path):
    for part in path.parts:
        assert not BANNED & set(re.split(r"[-_.]", part.lower()))


@pytest.mark.parametrize("path", modules(), ids=str)
def test_module_docstring(path):
    assert ast.get_docstring(tree(path))


@pytest.mark.parametrize("path", TEXT, ids=str)
def test_no_machine_is_named(path):
    text = (ROOT / path).read_text()
    assert not [m[0] for m in MACHINE.finditer(text)]
    assert set(re.findall(r"https?://([\w.-]*\w)", text)) <= HOSTS


def test_machine_pattern_can_fire():
    assert (
        MACHINE.search("see /" + "root/x") and MACHINE.search("at 10" + ".1.2.3") and MACHINE.search("192" + ".168.0.7")
    )
    assert not MACHINE.search("torch 2.10.0, path tests/home/x, cuda 13.0, lib==10" + ".1.2.3")
