# SPDX-License-Identifier: Apache-2.0
"""Measures the links of a box, for the latency model: `vllm-ampere plan --probe`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from ..errors import AmpereError
from ..nodes import Node
from .inventory import Inventory, Link, LinkKind, Sample
from .latency import COLLECTIVE_FIXED_US

# One token's hidden vector, as a decode step sums it; a small prefill; and what bandwidth decides.
SIZES = (10 << 10, 1 << 20, 64 << 20)
# A ring whose messages take less than the model's fixed cost has no latency left to tell.
LEAST_LATENCY_US = 0.01
# What torchrun and its ranks may take to end when asked to.
_GRACE_S = 15
# vLLM's own port for the meeting of nodes.
_PORT = 29501
_SCRIPT = Path(__file__).with_name("link_timing.py")


def groups(inventory: Inventory) -> dict[LinkKind, list[int]]:
    """For each kind of link in a box, the cards whose ring it is the slowest link of."""
    found = {}
    for last in range(1, inventory.total):
        found[inventory.kind_between(0, last)] = list(range(last + 1))
    return found


def measure(inventory: Inventory, node: Node | None = None, device: str = "cuda", limit_s: float = 300) -> Inventory:
    """The box with its links as measured; every node calls it at about the same time.

    Args:
        inventory: the box that this machine is, or a node of.
        node: this machine among several; None where it is alone.
        device: "cuda"; "cpu" has processes in place of cards, over gloo.
        limit_s: the most seconds it may take.

    Returns:
        The inventory with `links` and `samples`; on other nodes than the first as it was.

    Raises:
        AmpereError: PyTorch is missing, the measurement failed or took too long, or its figures contradict each other.
    """
    if find_spec("torch") is None:
        raise AmpereError("links are measured with PyTorch, which is not installed", "install vLLM, which brings it")
    rank, master, port = (node.rank, node.master, _PORT) if node else (0, "127.0.0.1", _free_port())
    with tempfile.TemporaryDirectory() as folder:
        asked, figures, log = (Path(folder, name) for name in ("asked.json", "figures.json", "log"))
        wanted = {"device": device, "sizes": SIZES, "groups": groups(inventory), "cards": inventory.cards}
        asked.write_text(json.dumps(wanted))
        command = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nnodes={inventory.nodes}"]
        command += [f"--nproc-per-node={inventory.cards}", f"--node-rank={rank}"]
        command += [f"--master-addr={master}", f"--master-port={port}", str(_SCRIPT), str(asked), str(figures)]
        # The script's folder stays off its path: modules there have names of their own.
        variables = {**os.environ, "PYTHONSAFEPATH": "1", **(node.interface.variables if node else {})}
        _run(command, variables, log, limit_s)
        if rank:
            return inventory
        samples = [Sample.model_validate(sample) for sample in json.loads(figures.read_text())]
    links = {kind: fit([each for each in samples if each.link == kind]) for kind in groups(inventory)}
    return inventory.model_copy(update={"links": links, "samples": tuple(samples)})


def fit(samples: list[Sample]) -> Link:
    """The link under which the latency model gives the times of the smallest and the largest all-reduce.

    Args:
        samples: of one kind of link; its all-reduces count.

    Raises:
        AmpereError: the larger was not slower.
    """
    sums = sorted((each for each in samples if each.what == "all-reduce"), key=lambda each: each.nbytes)
    small, large = sums[0], sums[-1]
    if large.us <= small.us:
        raise AmpereError(
            f"over {small.link} {large.nbytes} bytes took {large.us:.0f} us and {small.nbytes} took {small.us:.0f}",
            "measure again, with nothing else on the cards",
        )
    steps = 2 * (small.cards - 1)
    us_per_byte = (large.us - small.us) / (large.nbytes - small.nbytes)
    latency = (small.us - COLLECTIVE_FIXED_US - us_per_byte * small.nbytes) / steps
    return Link(latency_us=max(latency, LEAST_LATENCY_US), gb_s=steps / small.cards / us_per_byte / 1e3)


def _run(command: list[str], variables: dict[str, str], log: Path, limit_s: float) -> None:
    """Run to the end, and leave no process behind."""
    with log.open("wb") as sink:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AmpereError(
                f"the links were not measured in {limit_s:.0f} s", "are all nodes started, and do they reach each other?"
            ) from None
        finally:
            # Ranks have sessions of their own: the launcher ends them when it is asked to end, not when it is killed.
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if status:
        said = log.read_text(errors="replace")
        errors = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception): .+)$", said, re.MULTILINE)
        reason = (errors or said.splitlines()[-1:] or ["it said nothing"])[0]
        raise AmpereError(f"the links could not be measured: {reason}", "see `vllm-ampere doctor`")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
