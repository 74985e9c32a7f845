# SPDX-License-Identifier: Apache-2.0
"""`pip install .` over an installed vLLM adds `vllm/ampere` and changes nothing; uninstalling it leaves vLLM whole."""

import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tests.repo.checkout import ROOT, files
from tests.repo.test_pins import PINS
from vllm.ampere import environment

pytestmark = pytest.mark.vllm  # the wheel cache and setuptools are those of `make env`
# Enough of vLLM to be one: its top, a few packages, and the files that the series touches.
PARTS = (
    *(
        "vllm/__init__.py",
        "vllm/version.py",
        "vllm/_version.py",
        "vllm/models/deepseek_v4",
        "vllm/v1/attention",
        "vllm/platforms",
    ),
    *re.findall(r"^--- a/(.*)", "".join(p.read_text() for p in sorted((ROOT / "patches").glob("*.patch"))), re.M),
)


class Installed:
    """A virtual environment that holds a part of the pinned vLLM, with its record, and setuptools."""

    def __init__(self, prefix: Path):
        self.prefix = prefix
        venv.create(prefix, with_pip=False, symlinks=True)
        (self.site,) = prefix.glob("lib/python*/site-packages")
        tools = environment.ENVIRONMENTS["cpu"].site_packages
        for tool in (*tools.glob("setuptools*"), tools / "_distutils_hack"):
            (self.site / tool.name).symlink_to(tool)

    def install_vllm(self) -> None:
        info = f"vllm-{PINS['vllm']['version']}.dist-info"
        with zipfile.ZipFile(environment.CACHE / PINS["vllm"]["wheel"]) as wheel:
            record = list(csv.reader(io.StringIO(wheel.read(f"{info}/RECORD").decode())))
            kept = [row for row in record if row[0].startswith((*PARTS, info)) and not row[0].endswith(".so")]
            wheel.extractall(self.site, [row[0] for row in kept])
        with (self.site / info / "RECORD").open("w", newline="") as file:
            csv.writer(file).writerows(kept)
        self.record = {row[0]: row[1] for row in kept if row[1]}

    def vllm_is_whole(self) -> bool:
        """Every file of vLLM has the hash that vLLM's own record gives it."""

        def digest(path):
            return (
                "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
            )

        return len(self.record) > 100 and all(
            digest(self.site / name) == wanted for name, wanted in self.record.items()
        )

    def pip(self, *words: str, cwd: Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.prefix / "bin" / "python", *words]
        done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.prefix / "bin" / words[0], *words[1:]], cwd=self.prefix, capture_output=True, text=True
        )


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the checkout's files, so that the build leaves nothing in it."""
    folder = tmp_path_factory.mktemp("sources")
    for path in files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    return folder


def install(target: Installed, sources: Path) -> None:
    target.pip("install", "--no-build-isolation", "--no-index", ".", cwd=sources)


def overlay_files() -> set[str]:
    return {str(path) for path in files() if path.parts[:2] == ("vllm", "ampere") and path.suffix == ".py"}


def test_over_an_installed_vllm(tmp_path, sources):
    target = Installed(tmp_path / "over")
    target.install_vllm()
    assert target.vllm_is_whole()
    before = {p.relative_to(target.site) for p in target.site.rglob("*")}

    install(target, sources)
    assert target.vllm_is_whole()
    for name in overlay_files():
        assert (target.site / name).read_bytes() == (ROOT / name).read_bytes(), name
    added = {str(p.relative_to(target.site)) for p in target.site.rglob("*") if p.is_file()} - set(map(str, before))
    assert all(name.startswith(("vllm/ampere/", "vllm_ampere")) or "__pycache__" in name for name in added)

    target.pip("uninstall", "--yes", "vllm-ampere", cwd=tmp_path)
    assert target.vllm_is_whole()
    assert {p.relative_to(target.site) for p in target.site.rglob("*") if "__pycache__" not in p.parts} == {
        p for p in before if "__pycache__" not in p.parts
    }


def test_without_vllm(tmp_path, sources):
    target = Installed(tmp_path / "alone")
    install(target, sources)
    done = target.run("python", "-c", "import vllm.ampere.kernels as k; print(*k.__path__)")
    assert done.stdout.strip() == str(target.site / "vllm" / "ampere" / "kernels"), done.stderr


def test_the_series_and_the_pins_travel_along(tmp_path, sources):
    target = Installed(tmp_path / "data")
    target.install_vllm()
    install(target, sources)
    data = target.site / "vllm" / "ampere" / "_shipped"
    shipped = {p.relative_to(data): p.read_bytes() for p in data.rglob("*") if p.is_file()}
    wanted = [Path("upstream.toml"), *(path for path in files() if path.parts[0] == "patches")]
    assert shipped == {path: (ROOT / path).read_bytes() for path in wanted}

    console = target.run("vllm-ampere", "patches", "status", str(target.site))
    assert "Traceback" not in console.stderr and console.returncode == 1, "not applied yet"
    numbers = {path.name.partition("-")[0] for path in (ROOT / "patches").glob("*.patch")}
    assert numbers and numbers <= set(re.findall(r"\b\d{4}\b", console.stdout)), console.stdout + console.stderr
