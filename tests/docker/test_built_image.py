# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile, built by buildah in chroot isolation on a Debian base, without what vLLM requires: `make test-image`.

It needs no container engine and no CUDA image. What it cannot show is in docs/en/quickstart.md.
"""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.repo.checkout import OVERLAY, ROOT
from vllm.ampere.environment import check_disk, progress
from vllm.ampere.errors import AmpereError

pytestmark = pytest.mark.image
SUITE = "bookworm"
TOOLS = ("buildah", "debootstrap")
DISK_GIB = 8
STEP_SECONDS = 900
LOG = ROOT / ".cache" / "image.log"
# Certificates that this machine trusts beyond Debian's, as behind a proxy.
CERTIFICATES = Path("usr/local/share/ca-certificates")
# Modules of the overlay whose bytecode is missing or older than they are.
UNCOMPILED = """
import importlib.util, pathlib, struct, sys, sysconfig
package = pathlib.Path(sysconfig.get_path("purelib"), "vllm", "ampere")
modules = sorted(package.rglob("*.py"))
def current(path):
    compiled = pathlib.Path(importlib.util.cache_from_source(path))
    header = compiled.read_bytes()[:16] if compiled.exists() else b""
    stat = path.stat()
    return header[8:] == struct.pack("<II", int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size & 0xFFFFFFFF)
print(len(modules), *[path for path in modules if not current(path)])
"""


class Buildah:
    """buildah with a storage of its own below `folder`."""

    def __init__(self, folder: Path):
        storage = folder / "storage.conf"
        # A docker engine, where there is one, is not to be used.
        engine = folder / "bin" / "docker"
        engine.parent.mkdir()
        engine.write_text("#!/bin/sh\nexit 1\n")
        engine.chmod(0o755)
        self.environment = {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(storage),
            "BUILDAH_ISOLATION": "chroot",
            "PATH": f"{engine.parent}:{os.environ['PATH']}",
        }
        # vfs works everywhere and copies every layer whole.
        for driver in ("overlay", "vfs"):
            place = f"{folder}/{driver}"
            storage.write_text(f'[storage]\ndriver = "{driver}"\ngraphroot = "{place}"\nrunroot = "{place}-run"\n')
            if not subprocess.run(["buildah", "info"], env=self.environment, capture_output=True).returncode:
                break

    def __call__(self, *words: object) -> str:
        """Standard output of a command of buildah's; raises CalledProcessError if it fails."""
        command = ["buildah", *map(str, words)]
        return subprocess.run(
            command, env=self.environment, check=True, stdout=subprocess.PIPE, text=True, timeout=STEP_SECONDS
        ).stdout.strip()

    def commit_base(self, root: Path, name: str) -> None:
        """Make an image of a root file system."""
        container = self("from", "scratch")
        self("add", "--quiet", container, root, "/")
        self("commit", "--quiet", "--rm", container, name)


def attempt(command: list, what: str) -> None:
    """Run what this machine may not allow; skips with its last line if it does not."""
    try:
        with progress(what):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=STEP_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what}: not here: not done after {STEP_SECONDS} s")
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        pytest.skip(f"{what}: not here: {lines[-1]}")


def install_tools() -> None:
    """Bring buildah and debootstrap by apt-get; skips where that cannot be."""
    if os.geteuid():
        pytest.skip("chroot isolation and debootstrap need root")
    try:
        check_disk(ROOT, DISK_GIB)
    except AmpereError as error:
        pytest.skip(str(error))
    if all(map(shutil.which, TOOLS)):
        return
    if not shutil.which("apt-get"):
        pytest.skip(f"{' and '.join(TOOLS)} are not here, and neither is apt-get to bring them")
    attempt(["apt-get", "update"], "package lists")
    attempt(["apt-get", "install", "-y", "--no-install-recommends", *TOOLS, "crun"], "buildah and debootstrap")


@pytest.fixture(scope="module")
def built():
    """Runs a command in a container of the built image: `built(*words, status=0)` gives its output."""
    install_tools()
    folder = Path(tempfile.mkdtemp(prefix="image.", dir=ROOT / ".cache"))
    buildah = Buildah(folder)
    try:
        base = folder / "base"
        attempt(["debootstrap", "--variant=minbase", SUITE, base], f"debootstrap of Debian {SUITE}")
        shutil.copytree("/" / CERTIFICATES, base / CERTIFICATES, dirs_exist_ok=True)
        (base / "etc" / "pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        buildah.commit_base(base, "localhost/base")
        shutil.rmtree(base)
        probe = buildah("from", "localhost/base")
        with progress("chroot isolation"):
            try:
                buildah("run", probe, "--", "true")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"chroot isolation does not work here: exit status {error.returncode}")
        buildah("rm", probe)
        command = [ROOT / "docker" / "build.sh", "--build-arg", "BASE_IMAGE=localhost/base"]
        with progress(f"docker/Dockerfile on Debian {SUITE}"), LOG.open("w") as log:
            code = subprocess.run(
                [*command, "--build-arg", "PIP_NO_DEPS=1"],
                env={**buildah.environment, "IMAGE": "localhost/vllm-ampere"},
                stdout=log,
                stderr=log,
                timeout=STEP_SECONDS,
            ).returncode
        if code:
            pytest.fail(f"the image does not build:\n{LOG.read_text()[-3000:]}", pytrace=False)
        container = buildah("from", "localhost/vllm-ampere")

        def run(*words: str, status: int = 0) -> str:
            done = subprocess.run(
                ["buildah", "run", container, "--", *words],
                env=buildah.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=STEP_SECONDS,
            )
            assert done.returncode == status, done.stdout
            return done.stdout

        run.config = json.loads(buildah("inspect", "--type", "image", "localhost/vllm-ampere"))["Docker"]["config"]
        yield run
    finally:
        # Only this file system: whatever a broken run left mounted stays whole.
        subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True)


def test_patches_are_applied(built):
    count = len(list((ROOT / "patches").glob("*.patch")))
    assert f"applied: {count} patches" in built("vllm-ampere", "patches", "status").splitlines()[-1]


def test_the_doctor_runs(built):
    """It finds the patches on and a compiler; that there is no card and no PyTorch is for it to say."""
    pytest.importorskip("vllm.ampere.doctor", reason="this checkout has no doctor")
    report = built("sh", "-c", "vllm-ampere doctor; test $? = 1")
    status = {code: words for words, code in re.findall(r"^(ok|FAIL|warn|\?) +(AMP\d{3})", report, re.M)}
    assert status["AMP404"] == status["AMP307"] == "ok" and status["AMP201"] == "FAIL", report
    assert status["AMP306"] in ("ok", "?"), report


def test_every_module_is_compiled(built):
    count, *stale = built("python", "-c", UNCOMPILED).split()
    assert int(count) == len(list(OVERLAY.rglob("*.py"))) and stale == []


def test_nvcc_is_of_the_release_of_its_headers(built):
    header = built("sh", "-c", "grep -h 'define CUDA_VERSION' $CUDA_HOME/include/cuda.h").split()[-1]
    major, minor = divmod(int(header) // 10, 100)
    assert f"release {major}.{minor}," in built("sh", "-c", "nvcc --version")


def test_the_user_is_not_root_and_owns_its_home(built):
    script = "touch $HOME/mine && id -u && echo $HOME && test ! -w $CUDA_HOME && echo read-only"
    assert built("sh", "-c", script).split() == ["10001", "/cache", "read-only"]


def test_the_entry_point_knows_our_command(built):
    assert built("entrypoint.sh", "--version").startswith("vllm-ampere ")
    assert "is neither a command nor a folder" in built("entrypoint.sh", "nowhere", status=2)


def test_the_health_check_says_that_nothing_is_served(built):
    """A chroot sees the machine's processes, which may serve something: the check is shown none."""
    check = "import sys, pathlib; sys.path.insert(0, '/usr/local/bin'); import healthcheck; "
    check += "healthcheck.PROCESSES = pathlib.Path('/opt'); sys.exit(healthcheck.main())"
    assert "no `vllm serve` runs here" in built("python", "-c", check, status=1)


def test_what_the_engine_reads_is_set(built):
    config = built.config
    assert config["User"] == "10001" and config["Entrypoint"] == ["tini", "--", "entrypoint.sh"]
    assert set(config["Volumes"]) == {"/cache"} and config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.version"]
