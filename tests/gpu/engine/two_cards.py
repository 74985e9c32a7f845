# SPDX-License-Identifier: Apache-2.0
"""Engines over two cards and over one: tensor group, stages, graphs or none, each with DSpark, engrams and replay.

`tests/e2e/staged_engine.py` runs them, with the GPU's options: each runs the scenarios by itself, and the ones on a
single card then execute what the stages scheduled for several requests at once. Between two layers upstream's mHC
kernels compute on streams that are not rounded yet, where 5 to 32 rows are in a step; a stage sends rounded ones. So the
one card that stages are held against hands its streams over at the same layer as they do.
"""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.e2e.test_stages import TAPS
from vllm.ampere.model_spec import ModelSpec
from vllm.ampere.testing import tiny_checkpoint
from vllm.ampere.testing.engine import free_port

from .runs import DRAFTS, OPTIONS, ROOT, believing, execute, prompt

SCRIPT = ROOT / "tests/e2e/staged_engine.py"
NEW_TOKENS = 24
# Of an engine, and of one whose stages may wait for each other without end.
LIMIT_S, ONE_CARD_LIMIT_S = 360.0, 240.0
CHUNK = 512
# Block numbers mean the same in every engine, so that one can execute what another scheduled.
STAGED = OPTIONS | DRAFTS | {
    "max_model_len": 4_096, "max_num_batched_tokens": CHUNK, "num_gpu_blocks_override": 1_500, "max_num_seqs": 8,
}
# One window; two chunks; candidates cross the cut (past 1,024 tokens); from the prefix cache; every prompt row.
# Then six at once, one of which arrives late: several batches in flight over stages.
SCENARIOS = {
    "20": [[prompt(20, 21), 0]],
    "700": [[prompt(700, 21), 0]],
    "3000": [[prompt(3000, 21), 0]],
    "warm": [[prompt(3000, 21), 0]],
    "prompt": [[prompt(1500, 22), 0, {"sampling": {"prompt_logprobs": -1, "max_tokens": 2}}]],
    "several": [[prompt(n, 23), 0] for n in (20, 90, 330, 700, 1300)] + [[prompt(60, 23), 5]],
}
ALONE = ("20", "700", "3000", "warm", "prompt")
# Two processes on one card. NCCL refuses two ranks of one host on one device, so each claims a host of its own, and
# they meet over the loopback's sockets; for vLLM each is a node with one card.
OWN_HOST = {"CUDA_VISIBLE_DEVICES": "0", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_HOST_IP": "127.0.0.1"}


@dataclass(frozen=True)
class Layout:
    """An engine: layers of each stage, ranks of the tensor group, CUDA graphs or eager.

    Attributes:
        again: the same engine a second time, for the spread.
        one_card: both stages on the first card.
        meets: layer before which an engine without stages hands its streams over as stages do; 0: none.
    """

    partition: tuple[int, ...] = (8,)
    tensor: int = 1
    eager: bool = False
    again: bool = False
    one_card: bool = False
    meets: int = 0

    def __str__(self):
        name = f"tp{self.tensor}" if self.tensor > 1 else "pp" + ",".join(map(str, self.partition))
        name += f"-meets{self.meets}" if self.meets else ""
        return name + "-eager" * self.eager + "-again" * self.again + "-one-card" * self.one_card

    @property
    def twin(self) -> "Layout":
        """The engine on one card that this one is held against."""
        return Layout(eager=self.eager, meets=self.partition[0] if len(self.partition) > 1 else 0)


ONE, AGAIN = Layout(), Layout(again=True)
TENSOR = (Layout(tensor=2), Layout(tensor=2, eager=True))
# The second stage starts at the last KV source, and behind it at a layer that selects nothing.
STAGES = (Layout((4, 4)), Layout((5, 3)), Layout((5, 3), eager=True))
ONE_CARD = Layout((5, 3), one_card=True)


class Engines:
    """Runs layouts side by side, each once, and hands out what they recorded."""

    def __init__(self, folder: Path, at_once: int = 8):
        self.folder = folder
        self._pool, self._results, self._wanted = ThreadPoolExecutor(at_once), {}, []
        self.checkpoint = tiny_checkpoint.write(
            folder / "taps", "wide_topk", hidden_size=512, num_attention_heads=16, block_gain=0.1, drafts_agree=True, dspark_markov_rank=512,
            dspark_target_layer_ids=list(TAPS))
        self.spec = ModelSpec.from_config(json.loads((self.checkpoint / "config.json").read_text()))

    def start(self, layouts) -> None:
        """Start layouts; those of one process last, since they execute what the others scheduled."""
        self._wanted = sorted(set(layouts), key=lambda layout: (len(layout.partition) * layout.tensor == 1, str(layout)))
        for layout in self._wanted:
            self._results[layout] = self._pool.submit(self._run, layout)

    def result(self, layout: Layout) -> dict:
        """What `staged_engine.py` wrote, with the events of its trace in `trace`.

        Raises:
            RuntimeError: the engine failed; the message holds the end of its log.
        """
        return self._results[layout].result()

    def scenario(self, layout: Layout, name: str) -> dict:
        return self.result(layout)["scenarios"][name]

    def same(self, layout: Layout, name: str) -> dict:
        """The run on one card that a scenario over stages has to equal."""
        one = self.result(layout.twin)
        return one["replayed"][str(self._file(layout))] if name == "several" else one["scenarios"][name]

    def _file(self, layout: Layout) -> Path:
        return self.folder / f"{layout}.pickle"

    def _replays(self, layout: Layout) -> list[str]:
        """Files that an engine on one card executes: of the stages that ended well and are held against it."""
        staged = [other for other in self._wanted if len(other.partition) > 1 and other.twin == layout]
        return [str(self._file(other)) for other in staged if self._results[other].exception() is None]

    def _run(self, layout: Layout) -> dict:
        options = STAGED | {"tensor_parallel_size": layout.tensor, "enforce_eager": layout.eager,
                            "pipeline_parallel_size": len(layout.partition), "async_scheduling": not layout.eager}
        trace = self.folder / f"{layout}.trace"
        trace.touch()
        env = believing("sm80") | {"VLLM_AMPERE_TRACE": str(trace), "TRITON_CACHE_DIR": str(self.folder / "triton"),
                                   "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        if len(layout.partition) > 1:
            env["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layout.partition))
            # As where vLLM finds no NCCL library to load itself: nobody asks for its stream before the first step.
            env["VLLM_DISABLE_PYNCCL"] = "0" if layout.eager else "1"
        job = {"checkpoint": str(self.checkpoint), "sampling": {"max_tokens": NEW_TOKENS, "logprobs": -1}, "spoil": {},
               "scenarios": SCENARIOS, "meets": layout.meets, "replays": self._replays(layout), "output": str(self._file(layout)),
               "until": str(self.folder / f"{layout}.ended")}
        nodes = len(layout.partition) if layout.one_card else 1
        meeting = {"nnodes": nodes, "master_addr": "127.0.0.1", "master_port": free_port(),
                   "distributed_executor_backend": "mp"} if nodes > 1 else {}

        def node(rank: int) -> tuple[int | None, Path]:
            name = f"{layout}-{rank}"
            file, log = self.folder / f"{name}.json", self.folder / f"{name}.log"
            file.write_text(json.dumps(job | {"options": options | meeting | ({"node_rank": rank} if meeting else {})}))
            own = OWN_HOST | {"NCCL_HOSTID": f"stage-{rank}"} if meeting else {}
            code = execute([str(SCRIPT), str(file)], log, env | own, ONE_CARD_LIMIT_S if meeting else LIMIT_S)
            if rank == 0:
                Path(job["until"]).touch()
            return code, log

        with ThreadPoolExecutor(nodes) as threads:
            code, log = list(threads.map(node, range(nodes)))[0]
        if code != 0:
            raise RuntimeError(f"{layout} ended with {code}:\n{log.read_text(errors='replace')[-6000:]}")
        result = pickle.loads(self._file(layout).read_bytes())
        result["trace"] = [json.loads(line) for line in trace.read_text().splitlines()]
        return result


def rows(run: dict, vocabulary: int) -> torch.Tensor:
    """float32 [generated tokens, vocabulary] of log-probabilities, of a run with one request."""
    # A step has rows of drafts that it rejected as well.
    sampled = [[part[: len(tokens[0])] for part in arrays[:2]] for _, tokens, arrays in run["steps"] if any(tokens)]
    ids, values = (torch.cat([torch.from_numpy(part) for part in parts]) for parts in zip(*sampled))
    found = torch.full((len(ids), vocabulary), torch.nan).scatter_(1, ids.long(), values.float())
    return found[: len(run["answers"][0])]
