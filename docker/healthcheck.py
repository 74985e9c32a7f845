# SPDX-License-Identifier: Apache-2.0
"""The health check of the image: exit status 0 if the server of this container answers `/health`, else 1.

The address is read from the server's own command line, so that it follows `--port`. A node that serves no API
(`--headless`, the second of two) is healthy while its process is there.
"""

import argparse
import ssl
import sys
import urllib.request
from pathlib import Path

PROCESSES = Path("/proc")
TIMEOUT_SECONDS = 5
# How a command line names vLLM before its `serve`: the script, or the module behind it.
SERVER = ("vllm", "vllm.entrypoints.cli.main")


def server_options() -> list[str] | None:
    """Words after `vllm serve` of the oldest such process; None if there is none."""
    for entry in sorted(PROCESSES.glob("[0-9]*"), key=lambda entry: int(entry.name)):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended since
        for place, (program, command) in enumerate(zip(words, words[1:])):
            if Path(program).name in SERVER and command == "serve":
                return words[place + 2 :]
    return None


def healthy(options: list[str]) -> bool:
    """Whether a server with these options answers. Raises OSError when it cannot be reached."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--port", default="8000")
    parser.add_argument("--ssl-certfile")
    known, _ = parser.parse_known_args(options)
    if known.headless:
        return True
    host = "127.0.0.1" if known.host in (None, "", "0.0.0.0", "::") else known.host
    host = f"[{host}]" if ":" in host else host
    url = f"{'https' if known.ssl_certfile else 'http'}://{host}:{known.port}/health"
    # The certificate is the server's own and names the outside; this only asks whether it answers.
    unchecked = ssl._create_unverified_context() if known.ssl_certfile else None
    with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=unchecked) as response:
        return response.status == 200


def main() -> int:
    """Check once; the reason of a failure goes to stdout, which `docker inspect` shows."""
    options = server_options()
    if options is None:
        print("no `vllm serve` runs here")
        return 1
    try:
        return 0 if healthy(options) else 1
    except OSError as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main())
