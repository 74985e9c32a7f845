# SPDX-License-Identifier: Apache-2.0
"""`vllm-ampere profile --server` against a server that behaves, refuses, or has no profiler."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from vllm.ampere.cli import main as cli

KERNEL = {"ph": "X", "cat": "kernel", "name": "_mqa_logits_kernel", "pid": 0, "tid": 7, "ts": 5, "dur": 40}


@pytest.fixture
def served(tmp_path):
    """Starts a server that answers `status` and leaves a trace if it `writes`: its address, traces, what was asked."""
    servers = []

    def serve(status=200, writes=True):
        asked, folder = [], tmp_path / "traces"
        folder.mkdir()
        (folder / "rank0.111.pt.trace.json").write_text("an older run's, never read")

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked.append(self.path)
                if self.path == "/stop_profile" and writes:
                    (folder / "rank0.222.pt.trace.json").write_text(json.dumps({"traceEvents": [KERNEL]}))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}", folder, asked

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def run(capsys, url, folder):
    status = cli.main(["profile", "--server", url, "--traces", str(folder), "--seconds", "0.05", "--format", "json"])
    out, err = capsys.readouterr()
    return status, out, [line for line in err.splitlines() if not line.startswith("watching")]


def test_a_server_is_started_stopped_and_read(capsys, served):
    url, folder, asked = served()
    status, out, err = run(capsys, url + "/", folder)
    assert (status, err, asked) == (0, [], ["/start_profile", "/stop_profile"])
    (summary,) = json.loads(out)["traces"]
    assert summary["trace"] == "rank0.222.pt.trace.json"
    assert [(row["stage"], row["total_ms"]) for row in summary["rows"]] == [("indexer", 0.04), ("host gap", 0)]


@pytest.mark.parametrize("status, writes, message, hint", [
    (404, False, "the server has no profiler", "--profiler-config"),
    (500, False, "answered 500", "log"),
    (200, False, "left no trace in", "--traces"),
])  # fmt: skip
def test_a_server_that_cannot(capsys, served, status, writes, message, hint):
    url, folder, _ = served(status, writes)
    code, out, err = run(capsys, url, folder)
    assert (code, out, len(err)) == (1, "", 2)
    assert message in err[0] and err[1].startswith("hint: ") and hint in err[1]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "http://["])
def test_no_server(capsys, tmp_path, url):
    code, out, err = run(capsys, url, tmp_path)
    assert (code, out, len(err)) == (1, "", 2) and "does not answer" in err[0]


def test_no_folder(capsys, tmp_path):
    code, _, err = run(capsys, "http://127.0.0.1:9", tmp_path / "none")
    assert code == 1 and "there is no folder" in err[0]
