# SPDX-License-Identifier: Apache-2.0
"""Area 6: whether the layout fits the box, and what the processes meet over."""

import re

from ..planner.pipeline import describe, relays
from .case import Case, names_card
from .findings import Outcome, Unknown, fail, ok, warn

_PORT = 29501  # vLLM's default of --master-port
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Interfaces that other nodes do not reach: loopback, bridges of containers and of virtual machines.
_INNER = re.compile(r"lo$|docker|br-|veth|virbr|cni|flannel|cali|podman")
# Settings that cost much or hide a fault; the value that does it, None for any.
_DANGERS = {
    "NCCL_P2P_DISABLE": ("1", "cards of one node meet through host memory"),
    "NCCL_SHM_DISABLE": ("1", "cards of one node meet through sockets"),
    "NCCL_IB_DISABLE": ("1", "nodes meet over TCP, not over RDMA"),
    "NCCL_ALGO": (None, "NCCL no longer chooses by message size"),
    "NCCL_PROTO": (None, "NCCL no longer chooses by message size"),
    "NCCL_MAX_NCHANNELS": (None, "NCCL uses fewer channels"),
    "NCCL_LAUNCH_MODE": ("GROUP", "collectives wait for each other's launch"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "every collective blocks the host"),
}


def _fits_box(case: Case) -> Outcome | None:
    if case.preset is None:
        return None
    wanted, found = case.preset.inventory, case.inventory
    seen = f"{found.cards} cards of {found.card_gib:.1f} GiB, the preset is for {wanted.cards} of {wanted.card_gib:g}"
    # The same card reports some MiB more or less with its ECC mode and driver.
    short = found.cards < wanted.cards or found.card_gib < 0.99 * wanted.card_gib
    return fail(seen) if short else ok(seen)


def _planned(case: Case) -> Outcome | None:
    if case.plan is None:
        return None
    if case.plan.refusals:
        return fail(case.plan.refusals[0])
    if case.plan.warnings:
        return warn(case.plan.warnings[0])
    return ok(f"{case.plan.layout}: {case.plan.capacity_tokens:,} tokens of cache")


def _any_layout(case: Case) -> Outcome | None:
    if case.preset is not None:
        return None
    box = case.inventory
    from ..planner.memory import Serving
    from ..planner.search import search

    best = search(case.table, box, Serving())[0]
    if best.refusals:
        return warn(f"{box.cards} cards of {box.card_gib:.1f} GiB: the nearest is {best.layout}: {best.refusals[0]}")
    return ok(f"{best.layout} fits: {best.capacity_tokens:,} tokens of cache")


def _interfaces(case: Case) -> Outcome:
    there = case.system.names("/sys/class/net")
    if not there:
        raise Unknown("/sys/class/net lists no interface")
    named = {name: case.system.variables[name] for name in _INTERFACES if case.system.variables.get(name)}
    for name, value in named.items():
        # NCCL takes a list of prefixes, of exact names after "=", or of exclusions after "^"; gloo takes exact names.
        gloo = name.startswith("GLOO")
        if value.startswith("^") and not gloo:
            continue
        exact = gloo or value.startswith("=")
        for word in value.removeprefix("=").split(","):
            found = [interface for interface in there if interface == word or not exact and interface.startswith(word)]
            if not found:
                return fail(f"{name}={value}, and the interfaces are {', '.join(there)}")
            if all(map(_INNER.match, found)):
                return _across(case, f"{name}={value} is an interface that other nodes do not reach")
    return ok(", ".join(f"{name}={value}" for name, value in named.items()) or "NCCL and gloo choose for themselves")


def _own_name(case: Case) -> Outcome:
    if case.system.variables.get("GLOO_SOCKET_IFNAME"):
        return ok("GLOO_SOCKET_IFNAME says where gloo listens")
    address = case.system.own_address
    inner = address.startswith("127.") or any(
        _INNER.match(interface) for interface, own in case.system.addresses.items() if own == address
    )
    seen = f"this machine's name stands for {address}"
    return _across(case, f"{seen}, which other nodes do not reach") if inner else ok(seen)


def _across(case: Case, seen: str) -> Outcome:
    """A failure where the preset spans nodes, and well enough on one."""
    return fail(seen) if case.nodes > 1 else ok(f"{seen}; one node does not mind")


def _dangers(case: Case) -> Outcome:
    variables = case.system.variables
    found = [
        f"{name}={variables[name]}: {what}" for name, (value, what) in _DANGERS.items()
        if variables.get(name) and value in (None, variables[name])
    ]
    return warn("; ".join(found)) if found else ok("no setting of NCCL's stands in the way")


def _port(case: Case) -> Outcome | None:
    if case.nodes == 1:
        return None
    return fail(f"somebody listens on port {_PORT}") if _PORT in case.system.listening else ok(f"port {_PORT} is free")


def _visible(case: Case) -> Outcome:
    named = case.system.variables.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return ok("CUDA_VISIBLE_DEVICES is not set")
    words = [word.strip() for word in named.split(",")]
    if len(set(words)) < len(words):
        return fail(f"CUDA_VISIBLE_DEVICES={named} names a card twice")
    unknown = [word for word in words if not any(names_card(word, card) for card in case.system.driver.cards)]
    if unknown:
        return fail(f"CUDA_VISIBLE_DEVICES={named}: no card is called {unknown[0]!r}; CUDA ignores it and what follows")
    return ok(f"CUDA_VISIBLE_DEVICES={named}")


def _partition(case: Case) -> Outcome:
    named = case.system.variables.get("VLLM_PP_LAYER_PARTITION")
    if not named:
        return ok("VLLM_PP_LAYER_PARTITION is not set")
    seen = f"VLLM_PP_LAYER_PARTITION={named}"
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", named) or sum(map(int, named.split(","))) != case.spec.num_hidden_layers:
        return fail(f"{seen} does not deal out {case.spec.num_hidden_layers} layers")
    partition = tuple(map(int, named.split(",")))
    if case.preset and partition != case.preset.layout.partition:
        return fail(f"{seen}, the preset cuts {','.join(map(str, case.preset.layout.partition))}", "unset it")
    return ok("; ".join([seen, *map(describe, relays(case.spec, partition))]))


CHECKS = {
    "AMP601": _fits_box,
    "AMP602": _planned,
    "AMP603": _any_layout,
    "AMP604": _interfaces,
    "AMP605": _own_name,
    "AMP606": _dangers,
    "AMP607": _port,
    "AMP608": _visible,
    "AMP609": _partition,
}
