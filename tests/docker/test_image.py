# SPDX-License-Identifier: Apache-2.0
"""The files of the image without building it: pins, context, entry point, health check, and who builds."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.docker import chroot_image
from tests.repo.checkout import ROOT, files
from tests.repo.test_pins import PINS, lock
from vllm.ampere import __version__

DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
LOCKED = lock("docker/constraints.txt")
# Writes its arguments down, then ends as `FAKE_STATUS` says or, with "wait", at a signal.
FAKE = """#!/bin/sh
trap 'echo ended; exit 143' TERM
echo "$(basename "$0") $*"
[ "${FAKE_STATUS:-0}" = wait ] || exit "${FAKE_STATUS:-0}"
while :; do sleep 0.05; done
"""
SECONDS = 30


def program(path: Path, text: str = FAKE) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def container(tmp_path):
    """Starts the entry point as the image would: with vllm-ampere on PATH, and a home."""
    program(tmp_path / "bin" / "vllm-ampere")
    (tmp_path / "home").mkdir()

    def start(*words, **variables):
        environment = {"PATH": f"{tmp_path / 'bin'}:{os.defpath}", "HOME": str(tmp_path / "home"), **variables}
        command = [str(DOCKER / "entrypoint.sh"), *words]
        return subprocess.Popen(
            command, env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


def ran(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out.strip(), err.strip()


def test_pins_agree():
    assert re.search(r"^ARG BASE_IMAGE=(.*)$", DOCKERFILE, re.M)[1] == PINS["image"]["base"]
    assert re.search(r"cuda:([\d.]+)-runtime-ubuntu24.04@sha256:[0-9a-f]{64}$", PINS["image"]["base"])[1].startswith(
        PINS["production"]["cuda"] + "."
    )
    assert LOCKED["vllm"] == PINS["vllm"]["version"]
    wanted = ("torch", "triton", "tilelang", "transformers")
    assert {name: LOCKED[name] for name in wanted} == {name: PINS["production"][name] for name in wanted}
    assert LOCKED["cuda_toolkit"] == PINS["image"]["cuda_toolkit"] + ".0"


def test_compiler_and_headers_are_of_one_release():
    compiler = ("nvidia_cuda_nvcc", "nvidia_cuda_crt", "nvidia_nvvm", "nvidia_cuda_nvrtc")
    headers = ("nvidia_cuda_runtime", "nvidia_cuda_cccl")
    assert len({LOCKED[name] for name in compiler}) == 1
    assert {LOCKED[name].rpartition(".")[0] for name in (*compiler, *headers)} == {PINS["production"]["cuda"]}


def test_the_lock_names_how_it_is_made():
    command = (DOCKER / "constraints.txt").read_text()
    assert f"vllm=={PINS['vllm']['version']}" in command
    assert f"cuda-toolkit[nvcc,cccl]=={PINS['image']['cuda_toolkit']}" in command
    installs = re.findall(r"pip install .*?-c /tmp/constraints.txt (.*?) \\", DOCKERFILE)
    assert installs == ["'cuda-toolkit[nvcc,cccl]'", "vllm"]


def test_the_dockerfile_passes_its_linter():
    done = subprocess.run(
        [Path(sys.prefix, "bin", "hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


@pytest.mark.parametrize("path", [p for p in files() if p.suffix == ".sh" or p == Path(".ci/run")], ids=str)
def test_scripts_pass_their_linter(path):
    done = subprocess.run(
        [Path(sys.prefix, "bin", "shellcheck"), "-x", ROOT / path], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout
    assert os.access(ROOT / path, os.X_OK)


def test_linters_find_faults(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN apt-get install gcc\n")
    (tmp_path / "script.sh").write_text("#!/bin/sh\nrm $1\n")
    for tool, name in (("hadolint", "Dockerfile"), ("shellcheck", "script.sh")):
        done = subprocess.run([Path(sys.prefix, "bin", tool), tmp_path / name], capture_output=True, timeout=SECONDS)
        assert done.returncode == 1


def test_caches_outlive_the_container():
    """Triton, TileLang, CUDA and vLLM keep what they compile below HOME, unless a variable says otherwise."""
    variables = dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*(?:\\\n.*)*)", DOCKERFILE, re.M))))
    assert variables["HOME"] in re.findall(r"^VOLUME (.*)$", DOCKERFILE, re.M)
    assert not [name for name in variables if "CACHE" in name]


def test_the_context_is_what_the_build_reads():
    """The list begins with everything left out, so a folder that it does not name stays outside."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*" and rules[-1] == "**/__pycache__"
    named = {rule.removeprefix("!") for rule in rules[1:-1]}
    assert all(rule.startswith("!") for rule in rules[1:-1]) and all((ROOT / name).exists() for name in named)
    assert not {name for name in named if name.startswith(".")}
    read = set(re.findall(r"\bdocker/[\w.]+", re.sub(r"#.*", "", DOCKERFILE)))
    assert {name for name in named if name.startswith("docker/")} == read


def test_a_wheel_can_be_built_from_the_context(tmp_path):
    """What setup.py needs is named in .dockerignore."""
    rules = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for path in files():
        if any(path == Path(rule) or Path(rule) in path.parents for rule in rules):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    command = [sys.executable, "setup.py", "-q", "build", "--build-lib", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = {p.relative_to(tmp_path / "out" / "vllm" / "ampere") for p in (tmp_path / "out" / "vllm").rglob("*.py")}
    assert built == {Path(*p.parts[2:]) for p in files() if p.parts[:2] == ("vllm", "ampere") and p.suffix == ".py"}
    assert (tmp_path / "out" / "vllm" / "ampere" / "_shipped" / "patches" / "series").exists()


@pytest.mark.parametrize(
    "words, expected",
    [
        ((), "--help"),
        (("--version",), "--version"),
        (("/models/V4.1",), "serve /models/V4.1"),
        (("/models/V4.1", "--preset", "p", "--", "--port", "9000"), "serve /models/V4.1 --preset p -- --port 9000"),
        (("serve", "/models/V4.1", "--preset", "p"), "serve /models/V4.1 --preset p"),
        (("doctor", "--model", "/models/V4.1"), "doctor --model /models/V4.1"),
        (("vllm-ampere", "plan", "--all"), "plan --all"),
    ],
    ids=str,
)
def test_argument_forms(container, words, expected):
    assert ran(container(*words)) == (0, f"vllm-ampere {expected}", "")


def test_programs_run_as_they_are(container):
    assert ran(container("sh", "-c", "echo $1; exit 3", "sh", "a b")) == (3, "a b", "")
    assert ran(container("/bin/echo", "here")) == (0, "here", "")


def test_every_command_of_ours_is_known(container):
    """A command that the command line gains has to be named in the entry point."""
    from vllm.ampere.cli.main import build_parser

    (commands,) = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    for command in commands.choices:
        assert ran(container(command)) == (0, f"vllm-ampere {command}", "")


def test_an_unknown_word_is_one_line_and_a_hint(container):
    status, out, err = ran(container("modles"))
    assert (status, out) == (2, "")
    assert err.splitlines()[0] == "vllm-ampere image: modles is neither a command nor a folder of a model"
    assert err.splitlines()[1].startswith("hint: ") and len(err.splitlines()) == 2


def test_a_refusal_ends_the_container_with_its_status(container):
    """`serve` runs the doctor before the server; what it returns is what the container returns."""
    assert ran(container("/models/V4.1", FAKE_STATUS="1")) == (1, "vllm-ampere serve /models/V4.1", "")


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root can write everywhere")
def test_a_home_that_cannot_be_written_is_said(tmp_path):
    program(tmp_path / "bin" / "vllm-ampere")
    home = tmp_path / "home"
    home.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    user = ["setpriv", "--reuid=10001", "--regid=10001", "--clear-groups"] if os.geteuid() == 0 else []
    script = shutil.copy(DOCKER / "entrypoint.sh", tmp_path)
    command = [*user, str(script), "/models/V4.1"]
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.defpath}", "HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {home}" in done.stderr and done.stderr.count("\n") == 2


def test_signals_reach_the_server(container):
    process = container("/models/V4.1", FAKE_STATUS="wait")
    assert process.stdout.readline() == "vllm-ampere serve /models/V4.1\n"
    assert "entrypoint" not in Path(f"/proc/{process.pid}/cmdline").read_text()
    process.send_signal(signal.SIGTERM)
    assert ran(process) == (143, "ended", "")


@pytest.fixture
def healthcheck():
    spec = importlib.util.spec_from_file_location("healthcheck", DOCKER / "healthcheck.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server():
    """A server on a port of its own whose `/health` answers `server.status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(made.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    made.status = 200
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_health_follows_the_server(healthcheck, server):
    port = str(server.server_port)
    assert healthcheck.healthy(["/models/V4.1", "--port", port])
    assert healthcheck.healthy([f"--port={port}", "--host", "0.0.0.0", "--tensor-parallel-size", "8", ""])
    server.status = 503
    with pytest.raises(OSError, match="503"):
        healthcheck.healthy(["--port", port])


def test_health_of_a_node_without_an_api(healthcheck):
    assert healthcheck.healthy(["/models/V4.1", "--headless", "--port", "1"])


@pytest.mark.parametrize("front", [["vllm"], ["python", "-P", "-m", "vllm.entrypoints.cli.main"]], ids=" ".join)
def test_the_server_is_found_by_its_command_line(healthcheck, tmp_path, monkeypatch, front):
    monkeypatch.setattr(healthcheck, "PROCESSES", tmp_path)
    commands = {1: ["tini", "--", "entrypoint.sh", "/models/a", "--", "--port", "9"], 7: ["vllm-ampere", "serve", "x"]}
    commands |= {30: ["/opt/vllm/bin/python", *front[1:], "serve", "b"] if front[1:] else ["/bin/vllm", "serve", "b"]}
    commands[4000] = ["vllm", "serve", "later"]
    for number, words in commands.items():
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    (tmp_path / "8").mkdir()  # a process that has ended
    assert healthcheck.server_options() == ["b", ""]
    shutil.rmtree(tmp_path / "30")
    shutil.rmtree(tmp_path / "4000")
    assert healthcheck.server_options() is None


def test_the_health_check_of_a_running_server(healthcheck, server, tmp_path, monkeypatch, capsys):
    """The whole check: it finds a process named as vLLM is, and asks the port that it was given."""
    monkeypatch.setattr(healthcheck, "PROCESSES", tmp_path)
    assert healthcheck.main() == 1 and capsys.readouterr().out == "no `vllm serve` runs here\n"
    fake = program(tmp_path / "bin" / "vllm", "#!/bin/sh\nread line\n")
    command = [fake, "serve", "m", "--port", str(server.server_port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # it ends when its input does
        (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        end = time.monotonic() + SECONDS
        while healthcheck.server_options() is None and time.monotonic() < end:  # the kernel has not set its words yet
            time.sleep(0.01)
        assert healthcheck.main() == 0
        server.status = 500
        assert healthcheck.main() == 1 and "500" in capsys.readouterr().out


BUILDERS = {
    "docker": ({"docker": FAKE, "buildah": FAKE}, "docker build --quiet"),
    "buildah": ({"docker": "#!/bin/sh\nexit 1\n", "buildah": FAKE}, "buildah bud --format docker --quiet"),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_the_builder_that_is_there_builds(name, tmp_path):
    programs, expected = BUILDERS[name]
    for tool, text in programs.items():
        program(tmp_path / "bin" / tool, text)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.defpath}", "IMAGE": "mine:1"}
    command = [DOCKER / "build.sh", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    named = f"--tag mine:1 --file docker/Dockerfile --build-arg VERSION={__version__} "
    assert done.stdout.startswith(f"{expected} {named}")
    assert done.stdout.strip().endswith("--build-arg PIP_INDEX_URL --build-arg PIP_EXTRA_INDEX_URL .")


def test_no_builder_is_one_line_and_a_hint(tmp_path):
    program(tmp_path / "bin" / "docker", "#!/bin/sh\nexit 1\n")
    for tool in ("dirname", "sh"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        [DOCKER / "build.sh"], env={"PATH": str(tmp_path / "bin")}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 1 and done.stdout == ""
    first, second = done.stderr.splitlines()
    assert "no docker engine answers, and there is no buildah" in first and second.startswith("hint: ")


def test_what_a_machine_does_not_allow_is_skipped_with_its_reason(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(pytest.skip.Exception, match="need root"):
        chroot_image.install_tools()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(chroot_image, "check_disk", lambda *_: None)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(pytest.skip.Exception, match="buildah and debootstrap are not here, and neither is apt-get"):
        chroot_image.install_tools()
    with pytest.raises(pytest.skip.Exception, match="^apt-get update: not here: no route$"):
        chroot_image.attempt(["sh", "-c", "echo more; echo no route >&2; exit 100"], "apt-get update")


def test_a_dockerfile_that_does_not_build_fails(tmp_path, monkeypatch):
    program(tmp_path / "tools" / "buildah", "#!/bin/sh\n[ $1 != bud ] || { echo the reason; exit 1; }\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    buildah = chroot_image.Buildah(tmp_path)
    with pytest.raises(pytest.fail.Exception, match="does not build:\nthe reason"):
        chroot_image.make_image(buildah, tmp_path / "log")
