# SPDX-License-Identifier: Apache-2.0
"""The image that docker/Dockerfile makes on a Debian base, without what vLLM requires: `make test-image`.

What this cannot show is in docs/en/quickstart.md.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.docker.chroot_image import IMAGE, Buildah, install_tools, make_base, make_image, remove, runner
from tests.repo.checkout import OVERLAY, ROOT

pytestmark = pytest.mark.image
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


@pytest.fixture(scope="module")
def buildah():
    """buildah, with the image in its storage."""
    install_tools()
    folder = Path(tempfile.mkdtemp(prefix="image.", dir=ROOT / ".cache"))
    made = Buildah(folder)
    try:
        make_base(made, folder)
        make_image(made, ROOT / ".cache" / "image.log")
        yield made
    finally:
        subprocess.run(["buildah", "rm", "--all"], env=made.environment, stdout=subprocess.DEVNULL)
        remove(folder)


@pytest.fixture(scope="module")
def built(buildah):
    return runner(buildah)


def test_patches_are_applied(built):
    count = len(list((ROOT / "patches").glob("*.patch")))
    assert f"applied: {count} patches" in built("vllm-ampere", "patches", "status").splitlines()[-1]


def test_the_doctor_runs(built):
    """It finds the patches on and a compiler; that there is no card and no PyTorch is for it to say."""
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


def test_what_the_engine_reads_is_set(buildah):
    config = json.loads(buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    assert config["User"] == "10001" and config["Entrypoint"] == ["tini", "--", "entrypoint.sh"]
    assert set(config["Volumes"]) == {"/cache"} and config["Healthcheck"]["Test"][0] == "CMD"
    assert config["Labels"]["org.opencontainers.image.version"]
