# SPDX-License-Identifier: Apache-2.0
"""The real OpenAI server of the pinned vLLM with a scripted engine core: scripted_server.py CONTROL_PORT <arguments>.

Everything is the server's own code (application, renderer, tokenizer, input processor, detokeniser, output
processor, parsers) but for the engine core, which "generates" the tokens of a text that the test supplies.

A request names its script in `vllm_xargs`: {"script": text, "chunk": tokens a step, "eos": 0 or 1, "ids": token ids
in place of a text, "hang": 1 to never finish}. A request without one takes the next script of the queue whose key
is part of its id (header X-Request-Id), else of the queue "". The control port, beside the server's:

    PUT  /queue/<key>   a JSON list of scripts, appended to that queue
    GET  /seen/<key>    what the core got of the requests whose id holds the key, oldest first; "" is every request
    GET  /live          ids of requests that the core has not finished
"""

import asyncio
import json
import sys
import threading
from collections import defaultdict, deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import vllm.v1.engine.core_client as core_client
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists

from vllm.ampere import checkpoint

EOS = 1
QUEUES: dict[str, deque[dict]] = defaultdict(deque)
SEEN: deque[dict] = deque(maxlen=4000)
LIVE: set[str] = set()


class Control(BaseHTTPRequestHandler):
    """The test's side door: fills queues and shows what reached the core."""

    def do_PUT(self):
        scripts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        QUEUES[self.path.removeprefix("/queue/")].extend(scripts)
        self._answer({})

    def do_GET(self):
        key = self.path.removeprefix("/seen/")
        self._answer(sorted(LIVE) if self.path == "/live" else [seen for seen in SEEN if key in seen["request_id"]])

    def _answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def script_of(request) -> dict:
    """The script that the request names, else the next of its queue, else a short answer."""
    own = dict(request.sampling_params.extra_args or {})
    if own.keys() & {"script", "ids", "hang"}:
        return own
    key = next((key for key in QUEUES if key and key in request.request_id), "")
    return QUEUES[key].popleft() if QUEUES[key] else {"script": "thought</think>No script was given."}


def made_up_logprobs(wanted: int | None, tokens: list[int]) -> LogprobsLists | None:
    """The sampled token first, then the ids after it, in steps of -1; twenty where the whole vocabulary is wanted."""
    if wanted is None or not tokens:
        return None
    wanted = min(wanted, 20) if wanted >= 0 else 20
    ids = np.array([[token + step for step in range(wanted + 1)] for token in tokens], dtype=np.int64)
    values = np.tile(-np.arange(wanted + 1, dtype=np.float32), (len(tokens), 1))
    return LogprobsLists(ids, values, np.zeros(len(tokens), dtype=np.int64))


class ScriptedCore:
    """Stands for the engine-core client of one data-parallel rank."""

    engine_ranks_managed = (0,)

    class resources:
        engine_dead = False

    def __init__(self, renderer):
        self._outputs: asyncio.Queue = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()
        self._tokenizer = renderer.tokenizer

    def __getattr__(self, name):
        if name.endswith("_async"):
            return self._nothing
        raise AttributeError(name)

    async def _nothing(self, *_, **__):
        return None

    async def get_output_async(self):
        return await self._outputs.get()

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def add_request_async(self, request):
        LIVE.add(request.request_id)
        task = asyncio.get_running_loop().create_task(self._play(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def abort_requests_async(self, request_ids):
        LIVE.difference_update(request_ids)

    def get_kv_event_sources(self):
        return {}

    def dp_engines_running(self):
        return False

    def shutdown(self, timeout=None):
        pass

    async def _play(self, request):
        sampling = request.sampling_params
        prompt = list(request.prompt_token_ids or [])
        SEEN.append({
            "request_id": request.request_id,
            "prompt_ids": prompt,
            "prompt": self._tokenizer.decode(prompt),
            "max_tokens": sampling.max_tokens,
            "stop": sampling.stop,
            "grammar": repr(sampling.structured_outputs) if sampling.structured_outputs else None,
            "reasoning_ended": request.reasoning_ended,
            "images": len(request.mm_features or []),
        })  # fmt: skip
        script = script_of(request)
        tokens = script.get("ids") or self._tokenizer.encode(script.get("script", ""), add_special_tokens=False)
        tokens = list(map(int, tokens)) + [EOS] * int(script.get("eos", 1))
        if EOS in tokens and not sampling.ignore_eos:
            tokens = tokens[: tokens.index(EOS) + 1]
        chunk, sent = int(script.get("chunk", 1)), 0
        while request.request_id in LIVE:
            if sent >= len(tokens) and script.get("hang"):
                await asyncio.sleep(0.01)
                continue
            part = tokens[sent : min(sent + chunk, sampling.max_tokens)]
            sent += len(part)
            if part and part[-1] == EOS and not sampling.ignore_eos:
                reason = FinishReason.STOP
            elif sent >= sampling.max_tokens or (sent >= len(tokens) and not script.get("hang")):
                reason = FinishReason.LENGTH
            else:
                reason = None
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=part,
                new_logprobs=made_up_logprobs(sampling.logprobs, part),
                finish_reason=reason,
            )
            await self._outputs.put(EngineCoreOutputs(outputs=[output]))
            await asyncio.sleep(0)
            if reason is not None:
                LIVE.discard(request.request_id)


def main() -> None:
    control = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Control)
    threading.Thread(target=control.serve_forever, daemon=True).start()
    checkpoint.inspect = lambda path: None  # config and tokenizer only: there are no weights to look at
    core_client.EngineCoreClient.make_async_mp_client = staticmethod(
        lambda *_, renderer=None, **__: ScriptedCore(renderer)
    )
    sys.argv = ["vllm", "serve", *sys.argv[2:]]
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
