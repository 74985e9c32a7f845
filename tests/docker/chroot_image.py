# SPDX-License-Identifier: Apache-2.0
"""Build docker/Dockerfile with buildah in chroot isolation on a Debian base: no container engine, no CUDA image.

Whatever this machine does not allow skips the test that asked, with the reason; a Dockerfile that does not build fails it.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Callable

import pytest

from tests.repo.checkout import ROOT
from vllm.ampere.environment import check_disk, progress
from vllm.ampere.errors import AmpereError

SUITE = "bookworm"
TOOLS = ("buildah", "debootstrap")
DISK_GIB = 8
STEP_SECONDS = 900
BASE, IMAGE = "localhost/base", "localhost/vllm-ampere"
# Certificates that this machine trusts beyond Debian's, as behind a proxy.
CERTIFICATES = Path("usr/local/share/ca-certificates")


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
        """Standard output of a command of buildah's, which may not be allowed here: see `attempt`."""
        return attempt(["buildah", *words], f"buildah {words[0]}", env=self.environment)


def attempt(command: list, what: str, **options) -> str:
    """Standard output of what this machine may not allow; skips with its last line if it does not."""
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=STEP_SECONDS, **options
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{what}: not here: not done after {STEP_SECONDS} s")
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        pytest.skip(f"{what}: not here: {lines[-1]}")
    return done.stdout.strip()


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
    with progress("apt-get install " + " ".join(TOOLS)):
        attempt(["apt-get", "update"], "apt-get update")
        attempt(["apt-get", "install", "-y", "--no-install-recommends", *TOOLS, "crun"], "apt-get install")


def remove(folder: Path) -> None:
    """Remove a folder, on its own file system only: what is mounted below it stays whole, and is an error."""
    subprocess.run(["rm", "-rf", "--one-file-system", folder], check=True)


def make_base(buildah: Buildah, folder: Path) -> None:
    """Make the image `BASE` of a bare Debian, and see that a command runs on it."""
    root = folder / "base"
    with progress(f"debootstrap of Debian {SUITE}"):
        try:
            attempt(["debootstrap", "--variant=minbase", SUITE, root], "debootstrap")
        finally:  # it leaves them mounted where it fails
            subprocess.run(["umount", "--quiet", root / "proc", root / "sys"], capture_output=True)
    shutil.copytree("/" / CERTIFICATES, root / CERTIFICATES, dirs_exist_ok=True)
    (root / "etc" / "pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
    with progress("the base image"):
        container = buildah("from", "scratch")
        buildah("add", "--quiet", container, root, "/")
        buildah("run", container, "--", "true")
        buildah("commit", "--quiet", "--rm", container, BASE)
    remove(root)


def make_image(buildah: Buildah, log: Path) -> None:
    """Make `IMAGE` by docker/build.sh, without what vLLM requires; fails the test with the end of the log."""
    command = [ROOT / "docker" / "build.sh", "--build-arg", f"BASE_IMAGE={BASE}", "--build-arg", "PIP_NO_DEPS=1"]
    with progress(f"docker/Dockerfile on Debian {SUITE}"), log.open("w") as output:
        code = subprocess.run(
            command, env={**buildah.environment, "IMAGE": IMAGE}, stdout=output, stderr=output, timeout=STEP_SECONDS
        ).returncode
    if code:
        pytest.fail(f"docker/Dockerfile does not build:\n{log.read_text()[-3000:]}", pytrace=False)


def runner(buildah: Buildah) -> Callable[..., str]:
    """Runs a command in a container of `IMAGE`: `run(*words, status=0)` gives its output, if that is its status."""
    container = buildah("from", IMAGE)

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

    return run
