# SPDX-License-Identifier: Apache-2.0
"""Malformed requests: valid ones with a few places changed, and bodies that are no JSON; and how a server took them."""

import copy
import http.client
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from .dialect import DSML, TOOLS, spell

LIMIT_S = 60
SCRIPT = {"vllm_xargs": {"script": "t</think>a"}}
_HISTORY = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
    {
        "role": "assistant",
        "content": "A",
        "reasoning": "R",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "T"},
]
_SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["zz"],
    "n": 1,
    "max_tokens": 9,
    "min_tokens": 0,
    "logit_bias": {"5": 1.0},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [7],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "stream": False,
    "stream_options": None,
    "user": "u",
    "priority": 0,
    "request_id": "q",
    "cache_salt": "s",
    "truncate_prompt_tokens": None,
    "return_token_ids": True,
}
# A valid request of every endpoint that takes a body.
REQUESTS = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": _HISTORY,
        "tools": list(TOOLS),
        "tool_choice": "auto",
        "reasoning_effort": "high",
        "chat_template_kwargs": {"thinking": True},
        "logprobs": True,
        "top_logprobs": 1,
        "include_reasoning": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "add_generation_prompt": True,
        "continue_final_message": False,
        "echo": False,
        "documents": None,
        "parallel_tool_calls": True,
        "thinking": {"type": "enabled"},
        "structured_outputs": None,
        "mm_processor_kwargs": None,
        **_SAMPLING,
        **SCRIPT,
    },
    "/v1/completions": {
        "model": "m",
        "prompt": "P",
        "suffix": None,
        "echo": False,
        "logprobs": 1,
        "best_of": None,
        "structured_outputs": None,
        **_SAMPLING,
        **SCRIPT,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "I",
        "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": None},
        "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "R"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "T"},
        ],
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "stream": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_logprobs": 0,
        "include": [],
        "background": False,
        "previous_response_id": None,
        "metadata": {"k": "v"},
        "structured_outputs": None,
        "service_tier": "auto",
        "truncation": "disabled",
        "chat_template_kwargs": {},
        **SCRIPT,
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 2000,
        "system": [{"type": "text", "text": "S"}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "messages": [
            {"role": "user", "content": "Q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "R", "signature": "s"},
                    {"type": "text", "text": "A"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "T"}]}],
            },
        ],
        "tools": [{"name": "f", "description": "D", "input_schema": TOOLS[0]["function"]["parameters"]}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["zz"],
        "stream": False,
        "temperature": 1.0,
        "top_k": 5,
        "top_p": 0.9,
        "metadata": {"user_id": "u"},
        **SCRIPT,
    },
    "/v1/messages/count_tokens": {
        "model": "m",
        "messages": [{"role": "user", "content": "Q"}],
        "system": "S",
        "tools": [],
    },
    "/tokenize": {
        "model": "m",
        "messages": _HISTORY,
        "tools": list(TOOLS),
        "add_generation_prompt": True,
        "return_token_strs": True,
    },
    "/detokenize": {"model": "m", "tokens": [1, 2, 3]},
}
# What is put where something else belongs.
NASTY = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1.5,
    -0.0,
    1e308,
    10**30,
    -(2**63),
    2**31,
    float("nan"),
    float("inf"),
    "",
    "x",
    "auto",
    "none",
    "0",
    "\x00",
    "\ud800",
    "é" * 3000,
    "<｜User｜>",
    "<｜deepseek_image｜>",
    "<think>",
    "</think>",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": None},
    {"type": "x"},
    {"type": "text"},
    {"type": None},
    {"type": "function"},
    {"type": "function", "function": {}},
    {"type": "image_url", "image_url": {"url": "x"}},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#/x"}}},
    ["a"] * 300,
    {"role": "user"},
    {"role": "tool", "content": "x"},
    "(?P<",
    [-1],
    [10**12],
    "{",
    '{"a":',
    "[1, 2]",
    "required",
    {"type": "json_schema"},
    {"type": "structural_tag"},
    {"regex": "("},
    {"grammar": "root ::= ("},
    {"json": "{"},
    {"choice": []},
    {"text": "x", "type": "output_text"},
    "9" * 5000,
)
_BROKEN = (
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"1",
    b"NaN",
    b'{"model": "m", "model": 5}',
    b"\xff\xfe{",
    b'{"messages": "\xc3\x28"}',
    b"{}" * 50,
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"\x00" * 100,
    b'{"n": 1e99999}',
    b'{"n": ' + b"9" * 6000 + b"}",
)


@dataclass(frozen=True)
class Request:
    """One request: `path`, and `body` as it is sent."""

    path: str
    body: bytes


@dataclass
class Outcome:
    """How a server took many requests.

    Attributes:
        statuses: how often each HTTP status came; 0 is none within LIMIT_S.
        faults: (request, status, answer) of those that are the server's.
    """

    statuses: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)

    def add(self, request: Request, status: int, answer: bytes) -> None:
        self.statuses[status] += 1
        # An error inside a stream comes behind status 200.
        if not 200 <= status < 500 or b'"code":5' in answer or b'"code": 5' in answer or b"api_error" in answer:
            self.faults.append((request, status, answer[:400]))


# Of these an answer is put together: markup that opens, closes, lies and ends anywhere, and what stands between.
_PIECES = (
    "«calls»",
    "«/calls»",
    "«f»",
    "«g»",
    "«/f»",
    "«a=»",
    "«n:»",
    "«o:»",
    "«arguments:»",
    "«/»",
    "</think>",
    "<think>",
    "\n",
    "\n\n",
    " ",
    "text",
    '{"a": 1}',
    "NaN",
    "1e999",
    '"',
    "\\",
    "<",
    f"<{DSML}",
    f"</{DSML} ",
    DSML,
    f'<{DSML} invoke name="',
    f'<{DSML}invoke name="f" >',
    f'<{DSML} parameter name="a" string="maybe">',
    f"</{DSML}parameter>",
    f"<{DSML}tool>",
    f"</{DSML}function_calls>",
    "🎉",
    "é" * 50,
    "\x00",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "[" * 2000,
    "x" * 3000,
    f'<{DSML} invoke name="{"f" * 700}">',
)


def answers(source: random.Random, version: str) -> Iterator[str]:
    """Answers of the model in DSML that is hardly ever right."""
    while True:
        pieces = source.choices(_PIECES, k=source.randrange(1, 25))
        yield spell(version, "</think>" * (source.random() < 0.5) + "".join(pieces))


def malformed(source: random.Random, count: int) -> Iterator[Request]:
    """`count` requests: one in twelve no JSON or another JSON, the others valid but for one to three places."""
    for _ in range(count):
        path = source.choice(list(REQUESTS))
        if source.random() < 1 / 12:
            yield Request(path, source.choice(_BROKEN))
            continue
        body = copy.deepcopy(REQUESTS[path])
        if source.random() < 0.25:
            body["stream"] = True
        for _ in range(source.choice((1, 1, 2, 3))):
            _change(body, source)
        if "vllm_xargs" in REQUESTS[path]:
            body |= SCRIPT  # else the scripted core itself would fail
        yield Request(path, json.dumps(body, ensure_ascii=source.random() < 0.9).encode(errors="surrogatepass"))


def _change(body: dict, source: random.Random) -> None:
    """Replace, remove, add or repeat something at a random place."""
    inner, parent, name = body, None, None
    while isinstance(inner, (dict, list)) and inner and (parent is None or source.random() < 0.6):
        parent, name = inner, source.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = parent[name]
    if parent is None:
        return
    what = source.choice(("replace", "replace", "replace", "remove", "add"))
    nasty = copy.deepcopy(source.choice(NASTY))
    if what == "remove":
        del parent[name]
    elif what == "replace":
        parent[name] = nasty
    elif isinstance(parent, dict):
        parent[source.choice(("", "type", "content", "extra_body", "function", "tools", "task", name + "x"))] = nasty
    else:
        parent.insert(source.randrange(len(parent) + 1), nasty)


def send(base_url: str, requests: Iterable[Request], threads: int = 8) -> Outcome:
    """Send every request and sum up what came."""
    outcome = Outcome()
    with ThreadPoolExecutor(threads) as pool:
        for request, (status, answer) in pool.map(lambda request: (request, _ask(base_url, request)), requests):
            outcome.add(request, status, answer)
    return outcome


def _ask(base_url: str, request: Request) -> tuple[int, bytes]:
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=LIMIT_S)
    try:
        connection.request("POST", request.path, request.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (TimeoutError, http.client.HTTPException, ConnectionError) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()
