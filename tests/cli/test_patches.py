# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere patches` as a user meets it: on an installed tree, with an installed series."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import tarfile
import zipfile

import pytest

PATCHED = "one\nhook\ntwo\n"


def model(site):
    return (site.root / "vllm/model.py").read_text()


def test_the_whole_round(site):
    site.vllm()
    ran = site.run("patches", "status")
    assert ran.status == 1 and ran.err == "hint: `vllm-ampere patches apply` patches it\n"
    assert ran.out == f"file           state     patches\nvllm/model.py  original  0010\nnot applied: 1 patches, {site.root}\n"

    ran = site.run("patches", "apply")
    assert (ran.status, ran.err, model(site)) == (0, "", PATCHED)
    assert ran.out == f"applied: 1 patches, 1 files changed, {site.root}\n"
    ran = site.run("patches", "apply")
    assert (ran.status, ran.err, ran.out) == (0, "", f"already applied: 1 patches, 0 files changed, {site.root}\n")

    ran = site.run("patches", "status", "--format", "json")
    assert ran.status == 0 and json.loads(ran.out) == {
        "tree": str(site.root),
        "vllm": "0.33.0",
        "state": "applied",
        "files": [{"file": "vllm/model.py", "state": "patched", "patches": ["0010-model-hook.patch"]}],
    }

    ran = site.run("patches", "revert", "--format", "json")
    assert (ran.status, model(site)) == (0, "one\ntwo\n")
    assert json.loads(ran.out)["changed"] == ["vllm/model.py"]
    ran = site.run("patches", "revert")
    assert ran.status == 0 and ran.out.startswith("not applied, nothing to revert: ")


def test_a_changed_file(site):
    site.vllm(model="mine\n")
    for action in ("apply", "revert", "export"):
        ran = site.run("patches", action)
        assert (ran.status, ran.out, model(site)) == (1, "", "mine\n")
        error, hint = ran.err.splitlines()
        assert error == f"error: {site.root}: vllm/model.py is neither vLLM 0.33.0's nor the patched one"
        assert hint.startswith("hint: bring the original back (pip install")
    ran = site.run("patches", "status")
    assert ran.status == 1 and "vllm/model.py  changed" in ran.out and ran.out.splitlines()[-1].startswith("not recognised")
    assert ran.err.startswith("hint: bring the original back")


def test_after_a_killed_run(site):
    site.vllm()
    (site.root / "vllm/.ampere-journal").mkdir()
    ran = site.run("patches", "status")
    assert ran.status == 1 and ran.out.splitlines()[-1].startswith("interrupted") and "roll it back before they start" in ran.err
    ran = site.run("patches", "apply")
    assert (ran.status, model(site)) == (0, PATCHED)
    assert ran.err == "warning: an earlier run had been killed half-way; it was rolled back first\n"
    assert site.run("patches", "status").status == 0


def test_another_tree_with_overlay(site, tmp_path):
    other = tmp_path / "checkout"
    (other / "vllm").mkdir(parents=True)
    (other / "vllm/__init__.py").write_text("")
    (other / "vllm/model.py").write_text("one\ntwo\n")
    assert site.run("patches", "apply", "--overlay", "checkout").status == 0
    assert (other / "vllm/model.py").read_text() == PATCHED and (other / "vllm/ampere/arch.py").is_file()
    assert not (other / "vllm/ampere/_shipped").exists()
    assert site.run("patches", "revert", "--overlay", str(other)).status == 0
    assert sorted(path.name for path in (other / "vllm").iterdir()) == ["__init__.py", "model.py"]

    site.vllm()
    ran = site.run("patches", "revert", "--overlay")
    assert ran.status == 2 and "runs this very overlay" in ran.err and (site.root / "vllm/ampere/arch.py").is_file()
    assert site.run("patches", "apply", "nowhere").err.splitlines()[0] == \
        "error: nowhere is not a vLLM tree: it holds no vllm/__init__.py"


def test_export(site, tmp_path):
    site.vllm()
    ran = site.run("patches", "export", "--output", "ours.patch")
    assert (ran.status, ran.out) == (0, "")
    assert ran.err == "hint: in a checkout of vLLM 0.33.0: git apply ours.patch\n"
    written = (tmp_path / "ours.patch").read_bytes()
    assert site.run("patches", "export").out.encode() == written
    fresh = tmp_path / "fresh"
    (fresh / "vllm").mkdir(parents=True)
    (fresh / "vllm/model.py").write_text("one\ntwo\n")
    subprocess.run(["git", "init", "-q"], cwd=fresh, check=True)
    subprocess.run(["git", "apply", "--whitespace=nowarn", "../ours.patch"], cwd=fresh, check=True)
    assert (fresh / "vllm/model.py").read_text() == PATCHED
    assert (fresh / "vllm/ampere/arch.py").read_bytes() == (site.root / "vllm/ampere/arch.py").read_bytes()

    ran = site.run("patches", "export", "--output", "no/folder.patch")
    assert ran.status == 1 and ran.err.startswith("error: cannot write no/folder.patch: No such file")


def test_refresh_is_for_checkouts(site):
    site.vllm()
    ran = site.run("patches", "refresh", str(site.root))
    assert ran.status == 1 and "an installed series is not to be changed" in ran.err


@pytest.fixture
def index(site, tmp_path):
    """Small archives in place of the pinned ones, pinned by their own hashes, in the user's cache."""
    cache = tmp_path / "cache/vllm-ampere"
    cache.mkdir(parents=True)
    wheel, sdist = cache / "vllm-0.33.0-py3-none-any.whl", cache / "vllm-0.33.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/__init__.py", "vllm/_C.abi3.so", "vllm/vllm-rs", "vllm-0.33.0.dist-info/RECORD"):
            archive.writestr(name, "")
        archive.writestr("vllm/model.py", "one\ntwo\n")
        archive.writestr("vllm-0.33.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n")
        archive.writestr("vllm-0.33.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    source = tmp_path / "vllm-0.33.0"
    for name in ("PKG-INFO", "vllm/__init__.py", "csrc/a.cu"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(source, "vllm-0.33.0")
    lines = ["[cpu]", 'python = ["3.11", "3.12"]', "[vllm]", 'version = "0.33.0"']
    for kind, path in (("wheel", wheel), ("sdist", sdist)):
        lines += [f'{kind} = "{path.name}"', f'{kind}_sha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}"']
    (site.root / "vllm/ampere/_shipped/upstream.toml").write_text("\n".join(lines) + "\n")
    return cache


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_fetch_from_the_cache(site, index, tmp_path):
    cached = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    ran = site.run("patches", "fetch", "tree", **cached)
    assert (ran.status, ran.out) == (0, f"{tmp_path}/tree\n") and ran.err.startswith("unpacking ")
    assert names(tmp_path / "tree") == [
        "vllm-0.33.0.dist-info/METADATA", "vllm-0.33.0.dist-info/RECORD", "vllm-0.33.0.dist-info/WHEEL",
        "vllm/__init__.py", "vllm/model.py",
    ]
    assert site.run("patches", "apply", "tree").status == 0
    ran = site.run("patches", "fetch", "tree", **cached)
    assert (ran.status, ran.err) == (0, "it was there already\n")

    assert site.run("patches", "fetch", "--sdist", "source", **cached).status == 0
    assert names(tmp_path / "source") == ["PKG-INFO", "csrc/a.cu", "vllm/__init__.py"]

    ran = site.run("patches", "fetch", str(tmp_path / "site"), **cached)
    assert ran.status == 2 and "is not the pinned tree" in ran.err
    (tmp_path / "file").write_text("")
    ran = site.run("patches", "fetch", "file/tree", **cached)
    assert ran.status == 1 and "cannot write" in ran.err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def run_with_pip(site, tmp_path, links):
    """Fetch with the environment's pip, which may look only at one folder."""
    # Not `import pip`: it makes setuptools leave distutils alone for the rest of the process, and torch then fails.
    pip = importlib.metadata.distribution("pip").locate_file("pip")
    pip_only = tmp_path / "pip-only"
    pip_only.mkdir(exist_ok=True)
    if not (pip_only / "pip").exists():
        (pip_only / "pip").symlink_to(pip)
    return site.run(
        "patches", "fetch", "tree",
        XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONPATH=str(pip_only), PIP_FIND_LINKS=str(links), PIP_NO_INDEX="1",
        PIP_CONFIG_FILE=os.devnull,
    )


def test_fetch_downloads_by_hash(site, index, tmp_path):
    links = tmp_path / "links"
    shutil.move(index, links)
    ran = run_with_pip(site, tmp_path, links)
    assert ran.status == 0, ran.err
    assert ran.out == f"{tmp_path}/tree\n" and "downloading vllm-0.33.0-py3-none-any.whl" in ran.err
    assert (tmp_path / "cache/vllm-ampere/vllm-0.33.0-py3-none-any.whl").is_file()


def test_fetch_refuses_another_hash_and_leaves_nothing(site, index, tmp_path):
    links = tmp_path / "links"
    shutil.move(index, links)
    with zipfile.ZipFile(links / "vllm-0.33.0-py3-none-any.whl", "a") as archive:
        archive.writestr("vllm/evil.py", "")
    ran = run_with_pip(site, tmp_path, links)
    assert ran.status == 1 and ran.out == ""
    assert ran.err.splitlines()[-2:] == ["error: pip could not bring the pinned wheel", "hint: see pip's message above"]
    assert not (tmp_path / "tree").exists() and not list((tmp_path / "cache/vllm-ampere").iterdir())


def test_a_damaged_cache_is_not_used(site, index, tmp_path):
    links = tmp_path / "links"
    shutil.copytree(index, links)
    (index / "vllm-0.33.0-py3-none-any.whl").write_bytes(b"cut off")
    ran = run_with_pip(site, tmp_path, links)
    assert ran.status == 0 and "downloading" in ran.err


def test_fetch_without_pip(site, index, tmp_path):
    ran = site.run("patches", "fetch", "tree", XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert ran.status == 1 and ran.err.splitlines()[-2].endswith(" has no pip") and "ensurepip" in ran.err
