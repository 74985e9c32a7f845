# SPDX-License-Identifier: Apache-2.0
"""A server for the tests of the demo: fake_server.py PORT BEHAVIOUR.

Behaviours: serve, slow (healthy after 1 s), die (before it is up), hang (never up, deaf to SIGTERM),
die-answering, refuse, error-event, cut, silent.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, BEHAVIOUR = int(sys.argv[1]), sys.argv[2]
START = time.monotonic()
PIECES = ("The ", "weights ", "are ", "random.")


class Handler(BaseHTTPRequestHandler):
    """Answers /health and one chat completion as an OpenAI server does."""

    def do_GET(self):
        up = BEHAVIOUR != "slow" or time.monotonic() - START > 1
        self.send_response(200 if up else 503)
        self.end_headers()

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if BEHAVIOUR == "refuse":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "too long"}}')
            return
        self.send_response(200)
        self.end_headers()
        print("asked:", json.dumps(request), flush=True)
        if BEHAVIOUR == "error-event":
            self._event({"error": {"message": "engine gone"}})
            return
        for number, piece in enumerate(() if BEHAVIOUR == "silent" else PIECES):
            if BEHAVIOUR == "die-answering" and number == 2:
                print("(EngineCore pid=7) ERROR 01-01 [core.py:1] ValueError: the cause", flush=True)
                print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
                os._exit(9)
            if BEHAVIOUR == "cut" and number == 2:
                return
            self._event({"choices": [{"delta": {"content": piece}}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_):
        pass


print("INFO 01-01 00:00:00 [loader.py:12] Loading weights", flush=True)
if BEHAVIOUR == "die":
    print("Traceback (most recent call last):\nValueError: no such checkpoint\nsome last words", flush=True)
    sys.exit(3)
# A child as vLLM has them: it must go with the server.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if BEHAVIOUR == "hang":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
