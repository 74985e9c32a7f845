# SPDX-License-Identifier: Apache-2.0
"""What every receipt says besides its figures: which machine, which versions, which commit, which command."""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1
_PACKAGES = ("vllm", "torch", "triton", "tilelang")


def machine() -> dict:
    """Card and driver, or "none" and the processors, and Python; versions of what runs on them."""
    found = {"python": platform.python_version(), "versions": {name: _version(name) for name in _PACKAGES}}
    if not torch.cuda.is_available():
        return {"gpu": "none", "processors": os.cpu_count(), "architecture": platform.machine()} | found
    card = torch.cuda.get_device_properties(0)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[:1]
    return {
        "gpu": card.name, "gpus": torch.cuda.device_count(), "compute_capability": f"{card.major}.{card.minor}",
        "gpu_memory_gib": round(card.total_memory / 2**30, 1), "multiprocessors": card.multi_processor_count,
        "driver": driver[0] if driver else "unknown",
    } | found


def header(kind: str, scope: str) -> dict:
    """What every receipt begins with; `kind` and `scope` as in `write`."""
    return {
        "schema": SCHEMA, "kind": kind, "scope": scope, "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(), "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip() or "unknown",
        # Where a file lies on that machine is nobody's business.
        "command": " ".join(Path(word).name if word.startswith("/") else word for word in sys.argv),
    }


def write(path: Path, kind: str, scope: str, correctness: str, figures: list[dict], samples: dict) -> None:
    """Write a receipt.

    Args:
        path: file to write, with its folder.
        kind: what was measured.
        scope: one sentence that says which code ran on which card.
        correctness: what shows that the same build gives right results.
        figures: {"id", "value", "unit"} each.
        samples: the raw measurements that the figures come from.
    """
    content = header(kind, scope) | {"correctness": correctness, "figures": figures, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


@functools.cache
def _output(*command: str) -> str:
    """What a command says of this machine and checkout; asked once, since receipts are written as figures come."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except OSError:
        return ""
