# SPDX-License-Identifier: Apache-2.0
"""The pinned upstream: where its pins are, and how its files are fetched by hash with pip alone."""

import functools
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Callable

from . import envs
from .archive import pinned
from .errors import AmpereError, UsageError

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parents[1]
# What the build of the source archive's metadata imports; without it pip discards the archive.
_SDIST_TOOLS = (
    "cmake",
    "jinja2",
    "ninja",
    "packaging",
    "setuptools-rust",
    "setuptools-scm",
    "setuptools==80.9.0",
    "wheel",
)
_PIP_HINT = "see pip's message above"
Log = Callable[[str], None]


def in_checkout() -> bool:
    """Whether this package runs from a source checkout."""
    return (_CHECKOUT / "upstream.toml").is_file()


def project_path(name: str) -> Path:
    """A file or folder of the checkout's root ("upstream.toml", "patches"), or its copy inside an installed package."""
    return _CHECKOUT / name if in_checkout() else _HERE / "_shipped" / name


def series_dir() -> Path:
    """The folder of the patch series."""
    return project_path("patches")


@functools.cache
def pins() -> dict:
    """The tables of `upstream.toml`."""
    try:
        return tomllib.loads(project_path("upstream.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise AmpereError(f"cannot read upstream.toml: {error}", "reinstall vllm-ampere") from error


def version() -> str:
    """The pinned vLLM release."""
    return pins()["vllm"]["version"]


def cache_dir() -> Path:
    """Where fetched archives are kept: `.cache` of the checkout, else the user's cache."""
    return _CHECKOUT / ".cache" if in_checkout() else envs.cache_home() / "vllm-ampere"


def fetch(folder: Path, sdist: bool, log: Log) -> bool:
    """Unpack the pinned release into `folder`; returns False if it was there already.

    The wheel gives the Python tree without compiled libraries (0.2 GB); the source archive also has
    csrc, CMake files and tests, but lacks the third-party code that the wheel bundles.

    Args:
        folder: made by this call; appears only when complete.
        log: takes progress lines.

    Raises:
        AmpereError: pip cannot bring it, its hash is wrong, or the folder holds something else.
    """
    complete = folder / ("PKG-INFO" if sdist else f"vllm-{version()}.dist-info/RECORD")
    if complete.is_file():
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there and is not the pinned tree", "name a folder that does not exist")
    archive = _archive("sdist" if sdist else "wheel", log)
    log(f"unpacking {archive.name} into {folder}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as partial:
            unpacked = _untar(archive, Path(partial)) if sdist else _unzip(archive, Path(partial) / "tree")
            unpacked.replace(folder)
    except OSError as error:
        raise AmpereError(f"cannot write {folder}: {error.strerror or error}", "choose another folder") from error
    return True


def _unzip(archive: Path, folder: Path) -> Path:
    with zipfile.ZipFile(archive) as wheel:
        members = [name for name in wheel.namelist() if not name.endswith((".so", "/vllm-rs"))]
        wheel.extractall(folder, members)
    return folder


def _untar(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return folder / f"vllm-{version()}"


def _archive(kind: str, log: Log) -> Path:
    """The pinned "wheel" or "sdist" in the cache, downloaded if it is not there with the right hash."""
    pin = pins()["vllm"]
    path, digest = cache_dir() / pin[kind], pin[f"{kind}_sha256"]

    def bring(folder: Path) -> Path:
        log(f"downloading {path.name}")
        _download(kind, f"vllm=={pin['version']} --hash=sha256:{digest}\n", folder, log)
        return folder / "archives" / path.name

    try:
        return pinned(path, digest, bring)
    except OSError as error:
        why = error.strerror or error
        raise AmpereError(f"cannot write {path}: {why}", "make room, or set XDG_CACHE_HOME") from error


def _download(kind: str, requirement: str, folder: Path, log: Log) -> None:
    """Let pip put one archive, checked against its hash, into `folder`/archives."""
    source, target = folder / "requirement.txt", folder / "archives"
    download = ["download", "--no-deps", "--require-hashes", "-r", source, "-d", target]
    source.write_text(requirement)
    if kind == "wheel":
        if importlib.util.find_spec("pip") is None:
            raise AmpereError(f"{sys.executable} has no pip", f"run `{sys.executable} -m ensurepip`")
        # Named, so that a machine which could not run the wheel can still read it.
        python = pins()["cpu"]["python"][-1]
        machine = ["--platform", "manylinux_2_28_x86_64", "--abi", "abi3", "--python-version", python]
        command = [sys.executable, "-m", "pip", *download, "--only-binary=:all:", *machine]
        _run(command, "pip could not bring the pinned wheel", _PIP_HINT)
        return
    log("preparing a temporary environment for the source archive's metadata (PyTorch included)")
    _run([sys.executable, "-m", "venv", folder / "venv"], "python -m venv failed", "install Python's venv and ensurepip")
    pip = [folder / "venv" / "bin" / "python", "-m", "pip"]
    torch = f"torch=={pins()['cpu']['torch']}"
    hint = f"if {torch} was not found, add PyTorch's index of CPU wheels with PIP_EXTRA_INDEX_URL"
    _run([*pip, "install", *_SDIST_TOOLS, torch], "pip could not bring what the source archive needs", hint)
    named = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version()}
    options = ["--no-binary=vllm", "--no-build-isolation"]
    _run([*pip, *download, *options], "pip could not bring the pinned source archive", _PIP_HINT, **named)


def _run(command: list, failure: str, hint: str, **variables: str) -> None:
    """Run a command with its output on stderr; raise AmpereError if it fails."""
    done = subprocess.run([str(word) for word in command], stdout=sys.stderr, env={**os.environ, **variables})
    if done.returncode:
        raise AmpereError(failure, hint)
