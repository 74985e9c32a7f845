# SPDX-License-Identifier: Apache-2.0
"""The builder of the environments, with its commands and its machine replaced; then the real `.venv`."""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.repo.checkout import ROOT
from tests.repo.processes import ended
from tests.repo.test_pins import PINS, lock
from vllm.ampere import environment
from vllm.ampere.environment import Environment, Step
from vllm.ampere.errors import AmpereError


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """An empty checkout, on a machine that has everything."""
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "CACHE", tmp_path / ".cache")
    monkeypatch.setattr(environment, "LOG", tmp_path / ".cache" / "environment.log")
    monkeypatch.setattr(environment, "check_machine", lambda disk_gib: None)
    environment.CACHE.mkdir()
    shutil.copy(ROOT / "upstream.toml", tmp_path)
    return tmp_path


class Recorded(Environment):
    """An environment whose steps write down that they ran; `inputs` and `broken` are set by the test."""

    def steps(self):
        def step(name, run):
            def record():
                self.ran.append(name)
                if name in self.broken:
                    raise KeyboardInterrupt
                run()

            return Step(name, self.inputs.get(name, b""), record)

        return [step("virtual environment", self._create), step("packages", str), step("patched vLLM", str)]


@pytest.fixture
def recorded(checkout, monkeypatch):
    def make_python(command, failure, hint=""):
        made.python.parent.mkdir()
        made.python.touch()

    monkeypatch.setattr(environment, "call", make_python)
    made = Recorded(".venv", "lock.txt", disk_gib=0, engine=True)
    for name, value in (("ran", []), ("inputs", {}), ("broken", set())):
        object.__setattr__(made, name, value)
    return made


ALL = ["virtual environment", "packages", "patched vLLM"]


def test_a_second_build_does_nothing(recorded):
    recorded.build()
    recorded.build()
    assert recorded.ran == ALL


def test_changed_inputs_run_their_step_only(recorded):
    recorded.build()
    recorded.inputs["packages"] = b"another lock"
    recorded.build()
    assert recorded.ran[3:] == ["packages"]


def test_an_interrupted_step_runs_again(recorded):
    recorded.build()
    recorded.inputs["packages"] = b"another lock"
    recorded.broken.add("packages")
    with pytest.raises(KeyboardInterrupt):
        recorded.build()
    recorded.broken.clear()
    recorded.inputs.clear()  # back to what was built: the half-done step still has to run
    recorded.build()
    assert recorded.ran[3:] == ["packages", "packages"]


def test_a_lost_interpreter_rebuilds_all(recorded):
    recorded.build()
    shutil.rmtree(recorded.python.parent)
    recorded.build()
    assert recorded.ran == ALL * 2


def test_a_folder_of_someone_else_is_left_alone(recorded):
    theirs = recorded.prefix / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs")
    with pytest.raises(AmpereError, match="was not made by `make env`") as caught:
        recorded.build()
    assert theirs.read_text() == "theirs" and recorded.ran == [] and "rm -r .venv" in caught.value.hint


def test_an_interrupted_replacement_leaves_a_folder_that_is_ours(checkout, monkeypatch):
    made = Environment(".venv", "lock.txt", disk_gib=0, engine=False)
    (checkout / "lock.txt").touch()
    made.prefix.mkdir()
    made._record({"virtual environment": "old"})
    monkeypatch.setattr(environment, "call", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made._create()
    assert json.loads(made.stamp.read_text()) == {}


def test_inputs_cover_every_byte_of_the_series(checkout):
    (checkout / "patches").mkdir()
    (checkout / "patches" / "series").write_text("0010-a.patch\n")
    patch = checkout / "patches" / "0010-a.patch"
    seen = set()
    for content in ("one", "two"):
        patch.write_text(content)
        seen.add(environment._contents("upstream.toml", "patches"))
    patch.rename(patch.with_name("0020-a.patch"))
    seen.add(environment._contents("upstream.toml", "patches"))
    assert len(seen) == 3


@pytest.fixture
def pip(monkeypatch):
    """Stands in for the commands: `brings` is what a download puts into its folder."""

    class Pip:
        commands: list = []
        brings = ("thing-1.whl", b"pinned")
        failures: list = []

        def __call__(self, command, failure, hint=""):
            words = [str(word) for word in command]
            self.commands = [*self.commands, words]
            if self.failures:
                message = self.failures.pop(0)
                if message:
                    raise AmpereError(f"{failure}: {message}", hint)
            if "download" in words:
                Path(words[words.index("-d") + 1], self.brings[0]).write_bytes(self.brings[1])

    stand_in = Pip()
    monkeypatch.setattr(environment, "call", stand_in)
    return stand_in


PINNED = hashlib.sha256(b"pinned").hexdigest()


def test_a_wheel_is_fetched_once(checkout, pip):
    made = Environment(".venv", "lock.txt", disk_gib=0, engine=True)
    for _ in range(2):
        assert made._wheel("thing==1", "thing-1.whl", PINNED).read_bytes() == b"pinned"
    assert len(pip.commands) == 1 and pip.commands[0][-1] == "thing==1" and "--no-deps" in pip.commands[0]


def test_a_damaged_cached_wheel_is_replaced(checkout, pip):
    made = Environment(".venv", "lock.txt", disk_gib=0, engine=True)
    made._wheel("thing==1", "thing-1.whl", PINNED).write_bytes(b"pinn")
    assert made._wheel("thing==1", "thing-1.whl", PINNED).read_bytes() == b"pinned"


def test_another_file_than_the_pinned_one_is_refused(checkout, pip):
    pip.brings = ("thing-1.whl", b"another")
    made = Environment(".venv", "lock.txt", disk_gib=0, engine=True)
    with pytest.raises(AmpereError, match="not the file that upstream.toml pins"):
        made._wheel("thing==1", "thing-1.whl", PINNED)
    assert list(environment.CACHE.iterdir()) == []


def test_the_torch_index_is_asked_only_after_plain_pip_found_no_torch(checkout, pip):
    made = Environment(".venv", "lock.txt", disk_gib=0, engine=True)
    made._install()
    assert len(pip.commands) == 1 and environment.CPU_TORCH_INDEX not in pip.commands[0]
    pip.failures = ["No matching distribution found for torch==1+cpu"]
    made._install()
    assert len(pip.commands) == 3 and pip.commands[2][-1] == environment.CPU_TORCH_INDEX
    pip.failures = ["No matching distribution found for numpy==0"]
    with pytest.raises(AmpereError, match="numpy==0"):
        made._install()
    assert len(pip.commands) == 4
    pip.failures = ["No matching distribution found for torch==1+cpu"] * 2
    with pytest.raises(AmpereError, match="torch==1") as caught:
        made._install()
    assert environment.CPU_TORCH_INDEX in caught.value.hint


def test_a_failed_command_gives_its_error_line_and_keeps_its_output(checkout):
    code = "import sys; print('noise'); print('ERROR: the reason'); print('notice: later'); sys.exit(3)"
    with pytest.raises(AmpereError, match="^it failed: the reason$") as caught:
        environment.call([sys.executable, "-c", code], "it failed")
    assert caught.value.hint == "the whole output: .cache/environment.log"
    assert "noise" in environment.LOG.read_text()


@pytest.mark.parametrize(
    "version, message",
    [
        ((3, 10, 1), "3.11 or 3.12 is needed"),
        ((3, 13, 0), "3.11 or 3.12 is needed"),
        ((3, 11, 0), ""),
        ((3, 12, 9), ""),
    ],
)
def test_python_versions(version, message, monkeypatch):
    monkeypatch.setattr(sys, "version_info", version)
    if not message:
        return environment.check_python()
    with pytest.raises(AmpereError, match=message) as caught:
        environment.check_python()
    assert "PYTHON=python3.11" in caught.value.hint


MACHINES = {
    "processor": ("platform.machine", lambda: "aarch64", "x86-64 Linux is needed, and this is aarch64"),
    "libc": ("platform.libc_ver", lambda: ("glibc", "2.17"), "glibc 2.28 or later is needed"),
    "musl": ("platform.libc_ver", lambda: ("", ""), "this is another libc"),
    "venv": ("importlib.util.find_spec", lambda name: None, "lacks its venv module"),
    "disk": (
        "shutil.disk_usage",
        lambda path: shutil._ntuple_diskusage(10**9, 10**9, 2**29),
        "2 GiB of disk are needed, and 0.5 are free",
    ),
}


@pytest.mark.parametrize("name", MACHINES)
def test_machines_that_are_refused(name, monkeypatch):
    attribute, value, message = MACHINES[name]
    module, _, function = attribute.rpartition(".")
    monkeypatch.setattr(sys.modules[module], function, value)
    with pytest.raises(AmpereError, match=re.escape(message)) as caught:
        environment.check_machine(2)
    assert caught.value.hint and "\n" not in str(caught.value) + caught.value.hint


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("cpuinfo", "flags : sse4_2 avx", "AVX2"),
        ("meminfo", "MemAvailable: 1048576 kB", "2 GiB of memory are needed, and 1.0 are available"),
    ],
)
def test_processors_and_memory_that_are_refused(file, text, message, monkeypatch):
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: text if self.name == file else real(self, *a, **k))
    with pytest.raises(AmpereError, match=message):
        environment.check_machine(0)


def test_an_error_is_one_line_and_a_hint(capsys, monkeypatch):
    def refuse():
        raise AmpereError("no room", "make some")

    def fill():
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr(environment.signal, "signal", lambda *_: None)  # the test runner keeps its own
    assert environment.report("make env", refuse) == 1
    assert capsys.readouterr().err == "make env: no room\nhint: make some\n"
    assert environment.report("make env", fill) == 1
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ended_builder_ends_its_command(tmp_path, number):
    started = tmp_path / "started"
    slow = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    code = (
        f"import signal, sys; from pathlib import Path; sys.path.insert(0, {str(ROOT / 'vllm' / 'ampere')!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"import environment; environment.LOG = Path({str(tmp_path / 'log')!r})\n"
        f"run = lambda: environment.call([sys.executable, '-c', {slow!r}], 'failed')\n"
        "sys.exit(environment.report('make env', run))"
    )
    builder = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not (started.exists() and started.read_text()):
        assert builder.poll() is None
        time.sleep(0.05)
    builder.send_signal(number)
    _, err = builder.communicate(timeout=30)
    assert builder.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in err
    assert ended(int(started.read_text()))


@pytest.mark.vllm
def test_the_overlay_in_the_environment_is_this_checkout():
    import vllm
    import vllm.ampere

    assert [Path(p).resolve() for p in vllm.ampere.__path__] == [ROOT / "vllm" / "ampere"]
    assert vllm.__version__ == metadata.version("vllm") == PINS["vllm"]["version"]


@pytest.mark.vllm
def test_the_environment_is_the_one_of_this_checkout():
    """Fails when a pin or a patch changed after the last `make env`."""
    made = environment.ENVIRONMENTS["cpu"]
    assert made.done() == {step.name: hashlib.sha256(step.inputs).hexdigest() for step in made.steps()}


@pytest.mark.vllm
def test_installed_packages_are_the_locked_ones():
    locked = lock("tests/requirements-cpu.txt")
    if sys.version_info < (3, 12):
        del locked["six"]
    assert {name: metadata.version(name) for name in locked} == locked


@pytest.mark.vllm
def test_pip_cannot_delete_through_the_link():
    for name in ("vllm", "vllm-ampere"):
        assert metadata.distribution(name).files is None


@pytest.mark.vllm
def test_plugins_are_registered():
    groups = {"vllm.platform_plugins": "ampere_cpu", "vllm.general_plugins": "ampere"}
    for group, name in groups.items():
        (entry,) = metadata.entry_points(group=group, name=name)
        assert callable(entry.load())
