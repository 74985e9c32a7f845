# SPDX-License-Identifier: Apache-2.0
"""The nodes of a server, and the network interface over which they meet.

NCCL and gloo each choose one by themselves, and may choose loopback or a bridge of Docker's, which no other node
reaches; then the start hangs.
"""

import re
import socket
from dataclasses import dataclass

from .errors import AmpereError, UsageError

# Loopback, bridges and tunnels that exist inside one machine only.
_LOCAL_ONLY = re.compile(r"lo\d*|(docker|br-|veth|virbr|cni|flannel|cali|podman|lxc|lxd)\S*")


@dataclass(frozen=True)
class Interface:
    """A network interface and its address."""

    name: str
    address: str

    @property
    def variables(self) -> dict[str, str]:
        """What makes NCCL, gloo and vLLM take it."""
        # NCCL compares the beginning of a name, and the whole of it behind "=".
        return {
            "NCCL_SOCKET_IFNAME": f"={self.name}", "GLOO_SOCKET_IFNAME": self.name, "VLLM_HOST_IP": self.address,
        }


@dataclass(frozen=True)
class Node:
    """One of several nodes.

    Attributes:
        rank, count: its number, and how many there are.
        master: address of node 0.
        interface: over which they meet.
    """

    rank: int
    count: int
    master: str
    interface: Interface


def interfaces() -> list[Interface]:
    """Every address of this machine, IPv4 first, with its interface.

    Raises:
        AmpereError: the package psutil is missing.
    """
    try:
        import psutil
    except ImportError as error:
        raise AmpereError("reading network interfaces needs the package psutil", "install vLLM, which brings it") from error
    found = [
        (address.family, Interface(name, address.address.partition("%")[0]))
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return [each for _, each in sorted(found, key=lambda pair: pair[0])]


def named(name: str) -> Interface:
    """The interface of that name.

    Raises:
        UsageError: there is none with an address.
    """
    for each in interfaces():
        if each.name == name:
            return each
    raise UsageError(f"there is no network interface {name!r} with an address", f"there are {_candidates()}")


def towards(master: str, rank: int) -> Interface:
    """The interface over which this node and the first one meet.

    Args:
        master: address or name of the first node.
        rank: number of this node.

    Raises:
        AmpereError: the name does not resolve, no route leads there, the route ends in this machine, or the rank
            contradicts whose address it is.
    """
    try:
        family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError as error:
        hint = "give the first node's address, as both nodes reach it"
        raise AmpereError(f"--master-addr {master} cannot be reached: {error.strerror or error}", hint) from error
    name = {each.address: each.name for each in interfaces()}.get(own, own)
    if _LOCAL_ONLY.fullmatch(name):
        raise AmpereError(
            f"--master-addr {master} is reached over {name}, which no other node reaches",
            f"give an address of one of {_candidates()}, or name the interface with --interface",
        )
    if (rank == 0) != (own == target[0]):
        whose = "this node's own address" if rank else "not an address of this node"
        raise AmpereError(
            f"--node-rank {rank} does not go with --master-addr {master}, which is {whose}",
            "the node of --master-addr has --node-rank 0, the others count on from 1",
        )
    return Interface(name, own)


def _candidates() -> str:
    found = {each.name: each.address for each in reversed(interfaces()) if not _LOCAL_ONLY.fullmatch(each.name)}
    return ", ".join(f"{name} ({address})" for name, address in sorted(found.items())) or "none"
