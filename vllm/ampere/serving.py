# SPDX-License-Identifier: Apache-2.0
"""From a plan to the process that serves it: the environment and the command line of `vllm serve`.

What the user writes after `--` wins over what the plan says, argument by argument, and is said to.
"""

import ipaddress
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Mapping, Sequence

from .errors import AmpereError
from .nodes import Node
from .planner.plan import Plan

SERVED_NAME = "deepseek-v4.1-flash"
# The name under which vLLM registers the reasoning and the tool-call parser of V4.1.
PARSER = "deepseek_v41"
_FRONTEND = {
    "--served-model-name": SERVED_NAME,
    "--reasoning-parser": PARSER,
    "--enable-auto-tool-choice": None,
    "--tool-call-parser": PARSER,
}
# The plan's own; a variable of that name left over from another plan would cut the layers elsewhere.
_PARTITION = "VLLM_PP_LAYER_PARTITION"
# 475 GiB from a network disk take longer than vLLM's ten minutes.
_READY_SECONDS = 3600
# A spawned process imports PyTorch and vLLM all over again, 16 s on a slow disk and a copy of them in memory for each rank; a
# forked one has them. `vllm serve` spawns unless told; where CUDA or `--numa-bind` forbids a fork vLLM spawns all the same.
STARTED_BY = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
# Other spellings that vLLM's parser takes for arguments of ours.
ALIASES = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-ep": "--enable-expert-parallel",
    "-sc": "--speculative-config",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "--disable-expert-parallel": "--enable-expert-parallel",
    "--disable-auto-tool-choice": "--enable-auto-tool-choice",
    "--device-memory-utilization": "--gpu-memory-utilization",
}
# What a stage that starts inside a group of layers with one cache cannot go with, by the option that asks for it.
NOT_RELAYED = {
    "--enable-dbo": "microbatches",
    "--ubatch-size": "microbatches",
    "--kv-transfer-config": "a KV connector",
    "--kv-offloading-size": "a KV connector",
    "--enable-lora": "LoRA",
    "--decode-context-parallel-size": "decode context parallelism",
}


@dataclass(frozen=True)
class Launch:
    """A process to start.

    Attributes:
        command: program and arguments.
        environment: variables to set.
        removed: variables to take out of the environment.
        warnings: what the user should know, one line each.
    """

    command: list[str]
    environment: dict[str, str]
    removed: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)

    def applied(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of the process, made from that of the caller."""
        return {name: value for name, value in environment.items() if name not in self.removed} | self.environment

    def shell(self) -> str:
        """One command that a shell takes, an argument with its value on each line."""
        unset = [f"-u {name}" for name in self.removed]
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        program = shlex.join(self.command[: _first_flag(self.command)])
        flags = [shlex.join(words) for words in _grouped(self.command[_first_flag(self.command) :])]
        return " \\\n    ".join([" ".join(["env", *unset]), *variables, program, *flags])


def launch(
    plan: Plan, model: str, cache: Path, given: Sequence[str], environment: Mapping[str, str], node: Node | None = None
) -> Launch:
    """The process that serves a plan.

    Args:
        plan: one without refusals.
        model: folder of the checkpoint.
        cache: the user's cache folder; compiled kernels are kept below it.
        given: the user's own arguments of `vllm serve`.
        environment: of the caller. Its variables stay as they are, except for the partition, which is the plan's.
        node: this node of several; None where one node serves.

    Raises:
        AmpereError: the user asks for something that the plan's pipeline cuts cannot go with.
    """
    _check_beside_relay(plan, given)
    ours = _pairs(plan.arguments()) | _FRONTEND
    if node:
        ours |= {"--nnodes": str(node.count), "--node-rank": str(node.rank), "--master-addr": node.master}
        ours |= {"--headless": None} if node.rank else {}
    words, warnings = _merged(ours, given)
    # Without -P a folder named vllm where the server is started would be taken for the package.
    program = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model]
    partition = plan.environment()
    wanted = {
        "TRITON_CACHE_DIR": str(cache / "vllm-ampere" / "triton"),
        "TILELANG_CACHE_DIR": str(cache / "vllm-ampere" / "tilelang"),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(_READY_SECONDS),
        **STARTED_BY,
    }
    if node:
        wanted |= node.interface.variables
    kept = {name: value for name, value in wanted.items() if not environment.get(name)}
    stale = environment.get(_PARTITION)
    if stale is not None and stale != partition.get(_PARTITION):
        warnings.append(f"{_PARTITION}={stale} does not go with this plan and is left out; see --partition")
    removed = (_PARTITION,) if stale is not None and not partition else ()
    if not (node and node.rank) and (address := exposed_address(given, environment)):
        warnings.append(
            f"the server listens on {address} and asks for no key: whoever reaches that port can use it; "
            "add -- --host 127.0.0.1, or set VLLM_API_KEY"
        )
    return Launch([*program, *words], {**partition, **kept}, removed, warnings)


def _check_beside_relay(plan: Plan, given: Sequence[str]) -> None:
    """The engine refuses the same, once every process is up."""
    asked = [_flag(word)[0] for word in given if not word.startswith("--no-")]
    # One microbatch, or a group of one rank, is none.
    flag = next((flag for flag in asked if flag in NOT_RELAYED and _value(given, flag) != "1"), None)
    if flag and plan.relayed:
        cuts = ",".join(map(str, plan.layout.partition))
        raise AmpereError(
            f"{flag}: {NOT_RELAYED[flag]} cannot go with layers {cuts}, where a stage reads a cache of an earlier one",
            "leave it out, or take a layout of `vllm-ampere plan --all` that needs no relay",
        )


def exposed_address(given: Sequence[str], environment: Mapping[str, str]) -> str:
    """Where other machines reach a server that asks for no key; "" if they do not, or if it asks for one.

    Args:
        given: arguments of `vllm serve`.
        environment: of the server.
    """
    host = _value(given, "--host")
    if _value(given, "--uds") or _value(given, "--api-key") or environment.get("VLLM_API_KEY"):
        return ""
    if not host:
        return "all addresses of this machine"
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return "" if local else host


def node_count(plan: Plan) -> int:
    """How many nodes a plan takes.

    Raises:
        AmpereError: several, but not all cards of each: vLLM deals ranks out evenly, and the plan by node.
    """
    cards, per_node = plan.layout.cards, plan.inventory.cards
    count = -(-cards // per_node)
    if count > 1 and cards != count * per_node:
        raise AmpereError(
            f"{plan.layout} takes {cards} cards of {count} nodes with {per_node} each",
            "a layout over several nodes must take all of their cards",
        )
    return count


def _first_flag(words: Sequence[str]) -> int:
    """Where the arguments of `vllm serve MODEL` begin."""
    return words.index("serve") + 2


def _grouped(words: Sequence[str]) -> list[list[str]]:
    """Flags, each with the values that follow it."""
    groups: list[list[str]] = []
    for word in words:
        if not groups or re.match(r"--?[A-Za-z]", word):
            groups.append([])
        groups[-1].append(word)
    return groups


def _pairs(words: Sequence[str]) -> dict[str, str | None]:
    """Flags with their one value, or None for a bare one."""
    return {flag: " ".join(values) or None for flag, *values in _grouped(words)}


def _flag(word: str) -> tuple[str, bool]:
    """The flag that a word of the user's names, as ours spells it; and whether it names a key inside its value."""
    name, _, key = word.partition("=")[0].partition(".")
    name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    return ALIASES.get(name, re.sub(r"^--no-", "--", name)), bool(key)


def _value(given: Sequence[str], flag: str) -> str:
    """The last value of a flag in the user's words; "" if there is none."""
    found = ""
    for first, *rest in _grouped(given):
        if _flag(first)[0] == flag:
            found = first.partition("=")[2] or " ".join(rest)
    return found


def _merged(ours: Mapping[str, str | None], given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of the server, the user's last; and a line for each of ours that the user's replace."""
    words, warnings = [], []
    whole = {_flag(group[0])[0]: group for group in _grouped(given) if not _flag(group[0])[1]}
    partly = {_flag(group[0])[0] for group in _grouped(given) if _flag(group[0])[1]}
    for flag, value in ours.items():
        if flag in whole:
            was = f"{flag} {value}" if value else flag
            warnings.append(f"{shlex.join(whole[flag])} is yours; the plan has {was}")
        elif flag in partly:
            # vLLM collects dotted keys into one value, and that would replace a whole one of ours.
            for key, inner in json.loads(value or "{}").items():
                words += [f"{flag}.{key}", inner if isinstance(inner, str) else json.dumps(inner)]
        else:
            words += [flag, value] if value is not None else [flag]
    if "--config" in whole:
        warnings.append("what the file of --config sets is overridden by the plan's arguments where both set it")
    return [*words, *given], warnings
