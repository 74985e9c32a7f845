# SPDX-License-Identifier: Apache-2.0
"""Script: two tensor ranks on two pipeline stages, four processes, run two steps of upstream's worker.

    python exchange_ranks.py PORT FOLDER

The model of the first stage "selects" the same entries on both tensor ranks, in opposite orders. The first step is as
served; in the second nothing is exempt from slicing. Each rank saves a list of what it sent or received in FOLDER.
"""

import contextlib
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from vllm.plugins import load_general_plugins
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu_worker import Worker

from vllm.ampere.integration.pipeline import exchange
from vllm.ampere.pipeline_cut import TOPK

# An odd number of rows, so that a half ends inside one.
ROWS, ENTRIES, WIDTH = 3, 64, 256


class Runner:
    """A model runner whose model is given."""

    is_pooling_model = False

    def __init__(self):
        self.exchanged = []

    def execute_model(self, scheduled, received):
        if received is not None:
            self.exchanged.append(received.tensors)
            return None
        # As floats, since gathering on a CPU knows no integers: the second step slices and gathers the selection.
        selection = torch.arange(ROWS * ENTRIES).view(ROWS, ENTRIES).float()
        if get_tp_group().rank_in_group:
            selection = selection.flip(1).contiguous()
        streams = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH).bfloat16()
        self.exchanged.append({"hidden_states": streams, TOPK: selection})
        return IntermediateTensors(self.exchanged[-1])


def rank(number: int, port: int, folder: Path) -> None:
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(4, number, f"tcp://127.0.0.1:{port}", number, "gloo")
        initialize_model_parallel(2, 2)
        worker = SimpleNamespace(_pp_send_work=[], model_runner=Runner(), use_v2_model_runner=True,
                                 annotate_profile=lambda scheduled: contextlib.nullcontext(),
                                 vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend="mp")))
        for whole in (exchange.WHOLE, {}):
            exchange.WHOLE = whole
            Worker.execute_model(worker, SimpleNamespace(total_num_scheduled_tokens=ROWS))
        for handle in worker._pp_send_work:
            handle.wait()
        torch.save(worker.model_runner.exchanged, folder / f"rank{number}.part")
        (folder / f"rank{number}.part").rename(folder / f"rank{number}.pt")
        # A rank that left would close connections which the others still read.
        while len(list(folder.glob("*.pt"))) < 4:
            time.sleep(0.05)


if __name__ == "__main__":
    load_general_plugins()
    processes = multiprocessing.get_context("fork")
    ranks = [processes.Process(target=rank, args=(number, int(sys.argv[1]), Path(sys.argv[2]))) for number in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
