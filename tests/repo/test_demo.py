# SPDX-License-Identifier: Apache-2.0
"""The launcher of the demo against a fake server: what it prints, and that nothing is left running."""

import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.repo.checkout import OVERLAY, ROOT
from tests.repo.processes import alive, ended, gone
from vllm.ampere import demo, environment
from vllm.ampere.errors import AmpereError

FAKE = ROOT / "tests" / "repo" / "fake_server.py"
# The whole launcher, with the fake in the server's place and nothing built.
LAUNCHER = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and so their tests, ignore it
sys.path.insert(0, {overlay!r})
import demo, environment
environment.ROOT = environment.CACHE = demo.FOLDER = Path({folder!r})
demo.SERVER_LOG = demo.FOLDER / "server.log"
demo.STOP_SECONDS = 1
environment.build = demo.write_checkpoint = lambda *_: None
environment.check_memory = environment.check_disk = lambda *_: None
demo.server_command = lambda python, port: [sys.executable, {fake!r}, str(port), {behaviour!r}]
sys.exit(demo.main())
"""


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((demo.HOST, 0))
        return probe.getsockname()[1]


@pytest.fixture
def fake(port, tmp_path, monkeypatch):
    """Starts the fake with a behaviour; ends it after the test."""
    monkeypatch.setattr(demo, "STOP_SECONDS", 1)
    servers = []

    def start(behaviour):
        servers.append(demo.Server([sys.executable, str(FAKE), str(port), behaviour], port, tmp_path / "server.log"))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def launch(tmp_path, behaviour, port, *arguments, **options) -> subprocess.Popen:
    shutil.copy(ROOT / "upstream.toml", tmp_path)
    code = LAUNCHER.format(overlay=str(OVERLAY), folder=str(tmp_path), fake=str(FAKE), behaviour=behaviour)
    return subprocess.Popen([sys.executable, "-c", code, "--port", str(port), *arguments], text=True, **options)


def server_of(launcher: subprocess.Popen) -> int:
    """Process id of the launcher's server, once it has a child of its own."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        if children and len(alive(int(children[0]))) == 2:
            return int(children[0])
        time.sleep(0.05)
    raise AssertionError("the launcher started no server")


def test_waits_until_the_server_is_healthy(fake):
    server = fake("slow")
    start = time.monotonic()
    server.wait_healthy(20)
    assert time.monotonic() - start > 1
    assert server.phase() == "Loading weights"


def test_a_server_that_dies_gives_its_error_line(fake):
    server = fake("die")
    with pytest.raises(AmpereError, match=r"exit code 3\): ValueError: no such checkpoint") as caught:
        server.wait_healthy(20)
    assert str(server.log) in caught.value.hint


def test_a_server_that_hangs_is_given_up_and_killed(fake):
    server = fake("hang")
    # Long enough for two Pythons to start on a machine that has other work.
    with pytest.raises(AmpereError, match="not up after 6 s: Loading weights"):
        server.wait_healthy(6)
    assert len(alive(server.process.pid)) == 2
    server.stop()
    assert gone(server.process.pid, 10) and server.process.returncode == -signal.SIGKILL


def test_the_answer_is_printed_with_the_words_on_its_meaning(fake, capsys):
    server = fake("serve")
    server.wait_healthy(20)
    demo.chat(server)
    printed = capsys.readouterr().out
    assert "The weights are random.\n" in printed and "means nothing" in printed
    asked = server.log.read_text()
    assert '"stream": true' in asked and demo.QUESTION in asked


def test_pieces_come_one_by_one(fake, port):
    fake("serve").wait_healthy(20)
    assert list(demo.stream_chat(port, "a question", 8)) == ["The ", "weights ", "are ", "random."]


@pytest.mark.parametrize(
    "behaviour, message",
    [
        ("refuse", "answered 400: .*too long"),
        ("error-event", "engine gone"),
        ("cut", "broke off"),
        ("silent", "without a token"),
        ("die-answering", r"exit code 9\): ValueError: the cause"),
    ],
)
def test_a_failed_answer_is_one_line(fake, behaviour, message):
    server = fake(behaviour)
    server.wait_healthy(20)
    with pytest.raises(AmpereError, match=message) as caught:
        demo.chat(server)
    assert "log" in caught.value.hint and "\n" not in str(caught.value)


def test_a_busy_port_is_told_with_a_free_one(port):
    with socket.socket() as busy:
        busy.bind((demo.HOST, port))
        busy.listen()
        with pytest.raises(AmpereError, match=f"port {port} is in use") as caught:
            demo.check_port(port)
    demo.check_port(int(re.search(r"DEMO_PORT=(\d+)", caught.value.hint)[1]))


def test_a_port_just_left_can_be_used(fake, port):
    fake("serve").wait_healthy(20)
    with socket.create_connection((demo.HOST, port)):
        pass
    with pytest.raises(AmpereError, match="is in use"):
        demo.check_port(port)


def test_without_a_terminal_it_ends_after_the_answer(tmp_path, port):
    launcher = launch(tmp_path, "serve", port, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err
    assert "random." in out and f"http://{demo.HOST}:{port}" in out and "curl" in out
    demo.check_port(port)


def test_a_dead_server_ends_the_launcher_without_a_traceback(tmp_path, port):
    launcher = launch(tmp_path, "die", port, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 1
    assert "ValueError: no such checkpoint" in err and "server.log" in err and "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_signal_leaves_a_server_behind(tmp_path, port, number):
    """While the launcher waits for a server that will never be up."""
    launcher = launch(
        tmp_path, "hang" if number != signal.SIGKILL else "slow", port, stderr=subprocess.PIPE, start_new_session=True
    )
    server = server_of(launcher)
    os.kill(launcher.pid, number)
    _, err = launcher.communicate(timeout=60)
    if number == signal.SIGKILL:  # nobody is left to end the group: the kernel tells the server alone
        assert ended(server)
        for orphan in alive(server):
            os.kill(orphan, signal.SIGKILL)
    else:
        assert gone(server) and launcher.returncode == {signal.SIGINT: 130}.get(number, 128 + number)
        assert "Traceback" not in err


def on_terminal(tmp_path, port, *arguments):
    """The launcher on a terminal of its own, and a function that reads it up to a text."""
    ours, theirs = pty.openpty()
    launcher = launch(
        tmp_path, "serve", port, *arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = ""

    def read_until(text):
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 4096).decode()
        return seen

    return launcher, read_until, ours


def test_on_a_terminal_it_stays_until_interrupted(tmp_path, port):
    launcher, read_until, ours = on_terminal(tmp_path, port)
    assert "random." in read_until("Ctrl-C stops it")
    server = server_of(launcher)
    time.sleep(1)
    assert launcher.poll() is None and alive(server)
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait(60) == 0 and gone(server)
    os.close(ours)


def test_on_a_terminal_a_server_that_dies_later_ends_it(tmp_path, port):
    launcher, read_until, ours = on_terminal(tmp_path, port)
    read_until("Ctrl-C stops it")
    os.kill(server_of(launcher), signal.SIGKILL)
    assert "the server ended" in read_until("hint:") and launcher.wait(60) == 1
    os.close(ours)


def test_once_on_a_terminal_ends_after_the_answer(tmp_path, port):
    launcher, read_until, ours = on_terminal(tmp_path, port, "--once")
    read_until("stopping the server")
    assert launcher.wait(60) == 0
    os.close(ours)


def test_make_hands_its_variables_on():
    def dry(*variables):
        return subprocess.run(
            ["make", "-n", "demo", *variables], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout

    assert "--port 8123" in dry("DEMO_PORT=8123") and "--once" in dry("DEMO_ONCE=1")
    assert "--" not in dry("DEMO_ONCE=0").partition("demo.py")[2]


def test_users_own_settings_do_not_reach_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    server = demo.Server([sys.executable, "-c", "import os; print(dict(os.environ))"], 0, tmp_path / "server.log")
    server.process.wait()
    said = server.log.read_text()
    assert "VLLM_API_KEY" not in said and "PYTHONPATH" not in said and "'VLLM_AMPERE_PLATFORM': 'cpu'" in said


def test_too_little_memory_is_told_before_anything_is_built(monkeypatch, port):
    monkeypatch.setattr(demo, "MEMORY_GIB", 1 << 20)
    monkeypatch.setattr(environment, "build", lambda names: pytest.fail("built"))
    with pytest.raises(AmpereError, match="GiB of memory are needed"):
        demo.demo(port, once=True)
