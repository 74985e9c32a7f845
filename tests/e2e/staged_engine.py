# SPDX-License-Identifier: Apache-2.0
"""Script: run scenarios in an engine and record every step, then replay steps that other engines recorded.

    python staged_engine.py JOB.json
    python staged_engine.py JOB.json CONNECTION

JOB has `checkpoint`, `options` (engine keywords), `sampling` (keywords of SamplingParams), `scenarios` (name -> list of
[prompt, engine step at which it arrives]; a prompt is token ids, or {"ids": ids with one place for the image, "image":
[seed, width, height]}), `spoil` (name of a tensor -> scenario that runs once more with it spoiled), `replays` (files
that this script wrote, of which it executes the last scenario), `output` and, if wanted, `meets` (a layer, see
`stage_boundary.py`). With CONNECTION, the descriptor of one end of a `multiprocessing.Pipe`, only the first three count:
the engine says what its stages are, then answers calls of methods of `Recorded` until the other end is closed. With a
`node_rank` above 0 among the options it only runs that node's workers, until the file `until` of the job appears. The
pickled result has
    groups: the layers of every cache group, sorted;
    stages: a dict of `StageRecorder.record_stage` for every worker;
    scenarios, spoiled, replayed: runs, by scenario, by tensor, and by file.

A run is a dict:
    answers: generated tokens of each request, in the order of the scenario; not in a replay;
    scheduled: pickled scheduler outputs, in the order of execution;
    steps: of each of them that had tokens: requests, sampled tokens, and arrays of log-probabilities: token ids and
        values [sampled tokens, those asked for + 1] where something is sampled, then the same of rows of each prompt;
    preempted, cached: how often a request was preempted, and prompt tokens that the prefix cache served;
    workers: `StageRecorder.take_stage` of every worker.

A replay executes the recorded scheduler outputs one after the other, with no scheduler of its own: the same rows in
the same batches, whatever the engine that scheduled them did at the same time. It ends at the first step that differs.
"""

import json
import os
import pickle
import sys
import time
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from stage_boundary import meet_before
from stage_differences import in_step

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
EXTENSION = "stage_recorder.StageRecorder"


def fresh() -> dict:
    """A run of which nothing is known yet."""
    return {"scheduled": [], "steps": [], "preempted": 0, "cached": 0}


def given(prompt) -> dict:
    """A prompt of a job as vLLM takes it; images are noise."""
    if isinstance(prompt, list):
        return {"prompt_token_ids": prompt}
    from PIL import Image

    seed, width, height = prompt["image"]
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return {"prompt_token_ids": prompt["ids"], "multi_modal_data": {"image": Image.fromarray(noise)}}


class Recorded:
    """An engine in this process, with its workers, that records what it schedules and what comes of it."""

    def __init__(self, checkpoint: str, options: dict, sampling: dict):
        from vllm import LLM, SamplingParams

        self.llm = LLM(model=checkpoint, worker_extension_cls=EXTENSION, **options)
        common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        self.sampling = partial(SamplingParams, **common | sampling)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.stages = self.llm.collective_rpc("record_stage")
        groups = zip(*(stage["groups"] for stage in self.stages), strict=True)
        self.groups = [sorted({*chain(*parts)}) for parts in groups]
        self.run, self.withheld = fresh(), []
        executor, scheduler = self.core.model_executor, self.core.scheduler
        execute, update = executor.execute_model, scheduler.update_from_output

        def execute_model(scheduled, **kwargs):
            self.run["scheduled"].append(pickle.dumps(scheduled))
            self.run["preempted"] += len(scheduled.preempted_req_ids or ())
            self.run["cached"] += sum(request.num_computed_tokens for request in scheduled.scheduled_new_reqs)
            return execute(scheduled, **kwargs)

        def update_from_output(scheduled, output):
            self._note(scheduled, output)
            return update(scheduled, output)

        executor.execute_model, scheduler.update_from_output = execute_model, update_from_output

    def _note(self, scheduled, output) -> None:
        if scheduled.total_num_scheduled_tokens:
            tokens = [list(sampled) for sampled in output.sampled_token_ids]
            shown = [part for part in (output.logprobs, *output.prompt_logprobs_dict.values()) if part is not None]
            arrays = [np.asarray(array) for part in shown for array in (part.logprob_token_ids, part.logprobs)]
            self.run["steps"].append((output.req_ids, tokens, arrays))

    def _taken(self) -> dict:
        taken, self.run = self.run, fresh()
        taken["workers"] = self.llm.collective_rpc("take_stage")
        return taken

    def scenario(self, requests: list) -> dict:
        """Run requests: of each the prompt, the engine step at which it arrives, and perhaps {"sampling": keywords of
        its own, "abort": the step at which it is aborted if it still runs}."""
        answers, step = {}, 0
        # Beyond the last answer too: until every batch came back and the workers dropped the requests.
        while self.core.scheduler.has_requests() or self.core.batch_queue or step <= max(at for _, at, *_ in requests):
            for number, (prompt, at, *own) in enumerate(requests):
                own = own[0] if own else {}
                if at == step:
                    self.engine.add_request(str(number), given(prompt), self.sampling(**own.get("sampling", {})))
                if own.get("abort") == step:
                    self.engine.abort_request([str(number)])
            for output in self.engine.step():
                answers[int(output.request_id)] = list(output.outputs[0].token_ids)
            step += 1
        run = self._taken()
        run["answers"] = [answers.get(number) for number in range(len(requests))]
        return run

    def replay(self, recorded: dict) -> dict:
        """Execute recorded scheduler outputs, up to the first step in which tokens or log-probabilities differ."""
        executor, known, steps = self.core.model_executor, set(), self.run["steps"]
        for packed in recorded["scheduled"]:
            scheduled = pickle.loads(packed)
            known |= set(scheduled.num_scheduled_tokens)
            known -= scheduled.finished_req_ids
            output = executor.execute_model(scheduled, non_block=True).result()
            if output is None:
                output = executor.sample_tokens(None)
            self._note(scheduled, output)
            if steps and in_step(steps[-1], recorded["steps"][len(steps) - 1]):
                break
        ending = self.core.scheduler.schedule()
        ending.finished_req_ids = known
        executor.execute_model(ending)
        return self._taken()

    def forget(self, withheld: int = 0) -> None:
        """Empty the prefix cache; from now on so many blocks of the pool cannot be had."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        pool.free_blocks(self.withheld)
        assert self.llm.reset_prefix_cache(), "a request still holds blocks"
        self.withheld = pool.get_new_blocks(withheld)

    def spoil(self, name: str | None) -> None:
        """`StageRecorder.spoil_stage` in every worker."""
        self.llm.collective_rpc("spoil_stage", args=(name,))


def serve(engine: Recorded, calls: Connection) -> None:
    """Answer calls, each (method of `Recorded`, arguments), until the other end is closed."""
    calls.send(engine.stages)
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        calls.send(getattr(engine, method)(*arguments))


def follow(job: dict) -> None:
    """Run this node's workers until the file `until` of the job appears."""
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    options = job["options"] | {"worker_extension_cls": EXTENSION}
    config = EngineArgs(model=job["checkpoint"], **options).create_engine_config(headless=True)
    executor = MultiprocExecutor(config, monitor_workers=False)
    executor.start_worker_monitor()
    while not Path(job["until"]).exists() and not executor.is_failed:
        time.sleep(0.5)
    executor.shutdown()


def main(job: dict, *descriptor: str) -> None:
    if job["options"].get("node_rank"):
        return follow(job)
    if job.get("meets"):
        meet_before(job["meets"])
    engine = Recorded(job["checkpoint"], job["options"], job["sampling"])
    if descriptor:
        return serve(engine, Connection(int(descriptor[0])))
    result = {"groups": engine.groups, "stages": engine.stages, "spoiled": {}, "replayed": {}}
    result["scenarios"] = {name: engine.scenario(requests) for name, requests in job["scenarios"].items()}
    for name, scenario in job["spoil"].items():
        engine.spoil(name)
        result["spoiled"][name] = engine.scenario(job["scenarios"][scenario])
    engine.spoil(None)
    for file in job["replays"]:
        with open(file, "rb") as source:
            recorded = pickle.load(source)
        assert recorded["groups"] == engine.groups, "block numbers mean other layers here"
        result["replayed"][file] = engine.replay(list(recorded["scenarios"].values())[-1])
    with open(job["output"], "wb") as sink:
        pickle.dump(result, sink)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), *sys.argv[2:])
