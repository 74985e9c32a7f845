# SPDX-License-Identifier: Apache-2.0
"""The scripted server as a child process, and answers in one shape whichever way they came.

`Answer` is what a client sees: reasoning, content, calls, finish reason. `ScriptedServer.chat` asks for a whole
answer, `ScriptedServer.chat_stream` for the same one token by token, and `assert_same` holds them to each other.
"""

import json
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm.ampere.testing import engine, tiny_config, tiny_tokenizer, token_classes

# The tool parser and the reasoning parser bear the name of the tokenizer mode.
MODES = {"v4": "deepseek_v4", "v41": "deepseek_v41"}
USER = {"role": "user", "content": "Q"}


def write_model(folder: Path) -> Path:
    """A folder with V4.1's configuration and DeepSeek's tokenizer with its stand-ins, and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer.deepseek()
    classes = max(token_classes.token_classes(tokenizer)) + 1
    files = {
        "config.json": tiny_config.build_config(tiny_config.PRESETS["demo"], classes),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
        "tokenizer_config.json": tiny_tokenizer.tokenizer_config(1048576),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return folder


@dataclass
class Answer:
    """One choice of a chat answer.

    Attributes:
        reasoning, content: text; "" where the server gives null or nothing.
        calls: (name, arguments) in order; arguments are the JSON text as the client gets it.
        finish: the finish reason.
        argument_pieces: lengths of the streamed argument pieces of each call; empty for a whole answer.
        raw: the response body, or the list of events.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str | None = None
    argument_pieces: list[list[int]] = field(default_factory=list, compare=False)
    raw: dict | list = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_message(cls, message: Mapping, finish: str | None, raw: dict) -> "Answer":
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        return cls(message.get("reasoning") or "", message.get("content") or "", calls, finish, [], raw)

    def add(self, delta: Mapping) -> None:
        """Take in one streamed delta, in the shape of the chat endpoint."""
        self.reasoning += delta.get("reasoning") or ""
        self.content += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            function = call.get("function") or {}
            if call["index"] == len(self.calls):
                self.calls.append(("", ""))
                self.argument_pieces.append([])
            name, arguments = self.calls[call["index"]]
            piece = function.get("arguments") or ""
            self.calls[call["index"]] = (name + (function.get("name") or ""), arguments + piece)
            self.argument_pieces[call["index"]] += [len(piece)] if piece else []


class Refused(Exception):
    """The server answered with an error status.

    Attributes:
        status: HTTP status.
        message: the sentence that the client gets.
    """

    def __init__(self, status: int, body):
        error = body.get("error", body) if isinstance(body, dict) else body
        self.status, self.message = status, str(error.get("message") if isinstance(error, dict) else error)
        super().__init__(f"HTTP {status}: {self.message}")


class ScriptedServer(engine.Server):
    """`vllm serve` of one version with the core of scripted_server.py; a context manager.

    Args:
        version: "v4" or "v41". V4's prompt and parser are served on V4.1's configuration, which no endpoint shows.
        model: the folder of `write_model`.
        folder: takes the log.
        options: more engine keywords.
        env: variables on top of the engine's environment.

    Attributes:
        base_url: of the OpenAI server.
        model: the served model's name.
    """

    model = "m"

    def __init__(
        self,
        version: str,
        model: Path,
        folder: Path,
        options: Mapping | None = None,
        env: Mapping[str, str] | None = None,
    ):
        mode = MODES[version]
        own = {
            "served_model_name": self.model,
            "tokenizer_mode": mode,
            "reasoning_parser": mode,
            "tool_call_parser": mode,
            "enable_auto_tool_choice": True,
            "max_model_len": 300_000,
        }
        self._control_port = engine.free_port()
        super().__init__(
            model,
            folder,
            own | dict(options or {}),
            {"VLLM_ENABLE_RESPONSES_API_STORE": "1", **(env or {})},
            limit_s=600,
        )

    def _command(self, options: Mapping) -> list[str]:
        script = str(Path(__file__).with_name("scripted_server.py"))
        return [script, str(self._control_port), str(self._checkpoint), *engine.arguments(options)]

    # -- the side door

    def queue(self, key: str, scripts: Sequence[Mapping]) -> None:
        """Append scripts to the queue `key`; a client names it with the header X-Request-Id, "" needs no header."""
        self._control("PUT", f"/queue/{key}", list(scripts))

    def seen(self, key: str = "") -> list[dict]:
        """What reached the core of the requests whose id holds `key`, oldest first."""
        return self._control("GET", f"/seen/{key}")

    def live(self) -> list[str]:
        """Ids of requests that the core has neither finished nor seen aborted."""
        return self._control("GET", "/live")

    def _control(self, method: str, path: str, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._control_port}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    # -- the chat endpoint

    def chat(
        self, script: str, messages: Sequence[Mapping] = (USER,), *, xargs: Mapping | None = None, **fields
    ) -> Answer:
        """A whole answer. Raises Refused on an error status."""
        status, body = self.post("/v1/chat/completions", self._body(script, messages, xargs, fields))
        if status != 200:
            raise Refused(status, body)
        choice = body["choices"][0]
        return Answer.of_message(choice["message"], choice["finish_reason"], body)

    def chat_stream(
        self, script: str, messages: Sequence[Mapping] = (USER,), *, xargs: Mapping | None = None, **fields
    ) -> Answer:
        """The same answer as a stream, a delta a token. Raises Refused on an error status or an error event."""
        body = self._body(script, messages, xargs, fields) | {"stream": True}
        answer = Answer(raw=[])
        for event in self.events_of("/v1/chat/completions", body):
            answer.raw.append(event)
            if "error" in event:
                raise Refused(event["error"].get("code", 500), event)
            for choice in event.get("choices", []):
                answer.add(choice["delta"])
                answer.finish = choice.get("finish_reason") or answer.finish
        return answer

    def prompt(self, messages: Sequence[Mapping] = (USER,), **fields) -> str:
        """The prompt text that reaches the core for a chat request. Raises Refused on an error status."""
        return self.seen_of(lambda key: self.chat("t</think>a", messages, request_id=key, **fields))["prompt"]

    def seen_of(self, ask) -> dict:
        """What reached the core of the one request that `ask(key)` makes with `key` as its request id."""
        key = uuid.uuid4().hex
        ask(key)
        return self.seen(key)[-1]

    def events_of(self, path: str, body: Mapping) -> list[dict]:
        """The JSON payloads of an event stream, without [DONE]. Raises Refused on an error status."""
        request = urllib.request.Request(
            self.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                lines = answer.read().decode().split("\n")
        except urllib.error.HTTPError as error:
            raise Refused(error.code, json.load(error)) from None
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def _body(self, script, messages, xargs, fields) -> dict:
        return {
            "model": self.model,
            "messages": list(messages),
            "vllm_xargs": {"script": script, **(xargs or {})},
            **fields,
        }


def assert_same(whole: Answer, streamed: Answer) -> None:
    """A streamed answer equals the whole one, arguments as text."""
    assert (streamed.reasoning, streamed.content, streamed.calls, streamed.finish) == (
        whole.reasoning,
        whole.content,
        whole.calls,
        whole.finish,
    )
