# SPDX-License-Identifier: Apache-2.0
"""What `vllm-ampere serve` would start, read by vLLM's own parser and configuration; and two nodes of it, started."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from vllm.ampere import nodes, serving
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.planner import presets
from vllm.ampere.planner.plan import make_plan
from vllm.ampere.planner.weights import WeightTable
from vllm.ampere.testing import engine, tiny_checkpoint

pytestmark = pytest.mark.vllm
CONSOLE = Path(sys.executable).with_name("vllm-ampere")
START_SECONDS = 400
NODE = nodes.Node(1, 2, "192.0.2.5", nodes.Interface("ib0", "192.0.2.6"))


@pytest.fixture(scope="module")
def parser():
    """The parser of `vllm serve`, and its command."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command, whole = ServeSubcommand(), FlexibleArgumentParser()
    return command, whole, command.subparser_init(whole.add_subparsers())


def planned(name):
    preset = presets.load(name)
    return make_plan(WeightTable(ModelSpec()), preset.inventory, preset.layout, preset.serving)


FITTING = [name for name in presets.names() if not planned(name).refusals]


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("given", [(), ("--engram-config.use_thp", "false", "--max-model-len", "4096", "--port", "9000")])
def test_vllm_understands_every_argument(parser, name, given):
    from vllm.engine.arg_utils import AsyncEngineArgs

    command, whole, _ = parser
    plan = planned(name)
    node = NODE if plan.inventory.nodes == 2 else None
    start = serving.launch(plan, "MODEL", Path("cache"), given, {}, node)
    parsed = whole.parse_args(start.command[start.command.index("serve") :])
    command.validate(parsed)
    found = AsyncEngineArgs.from_cli_args(parsed)
    layout, asked = plan.layout, plan.serving
    assert parsed.model_tag == "MODEL" and parsed.served_model_name == ["deepseek-v4.1-flash"]
    assert (found.tensor_parallel_size, found.pipeline_parallel_size) == (layout.tensor, len(layout.partition))
    assert found.enable_expert_parallel is layout.expert_parallel
    assert found.max_model_len == (4096 if given else asked.context)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (asked.requests, asked.batched_tokens)
    assert found.gpu_memory_utilization == asked.memory_fraction
    assert found.engram_config.cpu_offload and found.engram_config.use_thp is not bool(given)
    drafts = {"method": "dspark", "num_speculative_tokens": 5}
    assert found.speculative_config == (drafts if asked.draft_tokens else None)
    assert parsed.headless is bool(node)
    assert (found.nnodes, found.node_rank, found.master_addr) == ((2, 1, "192.0.2.5") if node else (1, 0, "127.0.0.1"))


def test_the_parsers_are_registered():
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert serving.PARSER in ReasoningParserManager.list_registered()
    assert serving.PARSER in ToolParserManager.list_registered()


def test_every_other_spelling_is_known(parser):
    """Each alias that vLLM has for an argument of ours, or the user's would not replace it."""
    plan = planned("a800-40g-x16-tp8-pp2")
    words = serving.launch(plan, "MODEL", Path("cache"), (), {}, NODE).command
    ours = {word for word in words if word.startswith("--")} | {"--enable-expert-parallel"}
    spelt = {action.option_strings[0]: action.option_strings for action in parser[2]._actions if action.option_strings}
    theirs = {other: flag for flag in ours for other in spelt[flag] if other != flag}
    assert theirs == serving.ALIASES


def test_what_a_relay_refuses_is_asked_for_by_these_options(parser):
    spelt = {spelling for action in parser[2]._actions for spelling in action.option_strings}
    assert serving.NOT_RELAYED.keys() <= spelt


def test_vllm_reads_every_variable():
    from vllm import envs

    start = serving.launch(planned("a800-40g-x16-tp8-pp2"), "MODEL", Path("cache"), (), {}, NODE)
    read = {name for name in start.environment if name.startswith("VLLM_")}
    assert read == {"VLLM_PP_LAYER_PARTITION", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_HOST_IP"}
    assert read <= envs.environment_variables.keys()


@contextmanager
def started(log: Path, *words):
    """`vllm-ampere serve` with these words, in the engine's environment for a machine without a GPU."""
    with log.open("wb") as sink:
        child = subprocess.Popen(
            [CONSOLE, "serve", *map(str, words)], stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=engine.environment(VLLM_AMPERE_PLATFORM="cpu"), start_new_session=True,
        )
    try:
        yield child
    finally:
        engine.stop(child)


def answer(port: int, children: list, log: Path) -> dict:
    """The first answer of the server on a port, once it is up."""
    body = {"model": serving.SERVED_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12,
            "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert all(child.poll() is None for child in children), log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)
        except ConnectionError:
            time.sleep(0.5)
        except urllib.error.URLError as error:
            assert isinstance(error.reason, ConnectionError), error
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])


def test_one_node_and_two_give_the_same_answer(tmp_path):
    """The command as a user types it, on one node and on two; the two are processes that meet over loopback."""
    model = tiny_checkpoint.write(tmp_path / "model", "demo")
    options = ("--context", "1024", "--requests", 4, "--batched-tokens", 512, "--no-images", "--skip-doctor")
    replies = []
    for count, layout in ((1, ()), (2, ("--partition", "4,4", "--no-draft"))):
        box, port = tmp_path / f"box{count}.json", engine.free_port()
        box.write_text(json.dumps({"nodes": count, "cards": 1, "card_gib": 80}))
        given = ("--", "--enforce-eager", "--engram-config", '{"cpu_offload": false}', "--host", "127.0.0.1", "--port", port)
        given += ("--master-port", engine.free_port()) if count == 2 else ()
        with ExitStack() as stack:
            logs = [tmp_path / f"{count}-{rank}.log" for rank in range(count)]
            children = []
            for rank, log in enumerate(logs):
                meeting = ("--node-rank", rank, "--master-addr", "127.0.0.1", "--interface", "lo") if count == 2 else ()
                words = (model, "--inventory", box, *options, *layout, *meeting, *given)
                children.append(stack.enter_context(started(log, *words)))
            replies.append(answer(port, children, logs[0]))
            command = Path(f"/proc/{children[0].pid}/cmdline").read_bytes().split(b"\0")
            assert b"vllm.entrypoints.cli.main" in command  # it became the server
    one, two = (reply["choices"][0]["message"] for reply in replies)
    assert replies[0]["model"] == "deepseek-v4.1-flash" and one["reasoning"]
    assert two["reasoning"] == one["reasoning"]
