# SPDX-License-Identifier: Apache-2.0
"""The answer decoder as vLLM's parser of `deepseek_v4` and `deepseek_v41`.

vLLM composes such a parser from a reasoning parser and a tool parser, each with a state machine of its own, and has
different code for whole and streamed answers. Here one decoder reads both. The two parsers stay for what the engine
asks them: grammars, the end of the reasoning in token ids, the thinking budget.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall, FunctionCall
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.metrics import record_tool_parser_invocation
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.tool_parsers.utils import find_tool_properties

from ..failure import exit_on_error
from . import choices, switches
from .choices import chosen
from .decoder import AnswerDecoder, CallPiece, Piece
from .markup import END_THINK, THINK

NAMES = frozenset(("deepseek_v4", "deepseek_v41"))
# Tokens of the longest closing tags, and some: what a stop string can have taken from the end of a text.
_LAST_TOKENS, _LAST_CHARACTERS = 48, 32


@exit_on_error
def compose(reasoning_parser_cls, tool_parser_cls, strict_level) -> type["DeepseekParser"]:
    """The parser class for a pair of parsers of one version; either may be None."""
    choices.check()
    attributes = {
        "reasoning_parser_cls": reasoning_parser_cls,
        "tool_parser_cls": tool_parser_cls,
        "tool_strict_level": strict_level,
    }
    return type("DeepseekParser", (DeepseekParser,), attributes)


class DeepseekParser(DelegatingParser):
    """Reads the answers of one request; vLLM makes one for each choice.

    Attributes:
        call_was_cut: the answer ended inside its last call, whose arguments are an open JSON text.
    """

    def __init__(self, tokenizer, tools=None, *args, chat_template_kwargs: Mapping | None = None, **kwargs):
        super().__init__(tokenizer, tools, *args, chat_template_kwargs=chat_template_kwargs, **kwargs)
        self._tools = tools
        vocabulary = tokenizer.get_vocab()
        self._think, self._end_think, self._assistant = map(vocabulary.get, (THINK, END_THINK, "<｜Assistant｜>"))
        self._end_of_sequence = tokenizer.eos_token_id
        self._thinks = switches.is_thinking(chat_template_kwargs or {})
        self._starts_in_reasoning: bool | None = None
        self._decoder: AnswerDecoder | None = None
        self._last_ids, self._last_text = deque(maxlen=_LAST_TOKENS), ""
        self._hidden: list[str] = []
        self._counted, self._reasoning_tokens, self._count_is_final = 0, 0, False
        self.call_was_cut = False
        self._unclosed_is_content = chosen("unclosed_reasoning") == "content"
        self._names_twice = chosen("reasoning_field") == "both"

    # -- where the prompt leaves off

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        super().set_prompt_token_ids(prompt_token_ids)
        self._starts_in_reasoning = self._opens_reasoning(prompt_token_ids)

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return self._reasoning_parser is None or not self._opens_reasoning(input_ids)

    def _opens_reasoning(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside an open reasoning: the tags behind the last assistant header say so."""
        turn = list(itertools.takewhile(lambda token: token != self._assistant, reversed(prompt_token_ids)))
        if len(turn) < len(prompt_token_ids) and (self._think in turn or self._end_think in turn):
            return self._end_think not in turn
        return self._thinks

    def _starts(self) -> bool:
        return self._thinks if self._starts_in_reasoning is None else self._starts_in_reasoning

    # -- answers

    def parse(self, model_output, request, enable_auto_tools=False, model_output_token_ids=()):
        self._decoder = self._new_decoder(request)
        self._last_ids = deque(model_output_token_ids, maxlen=_LAST_TOKENS)
        self._last_text = model_output[-_LAST_CHARACTERS:]
        calls: list[CallPiece] = []
        reasoning = content = ""
        for piece in (self._decoder.feed(model_output), self._finish()):
            reasoning += piece.reasoning
            content += piece.content
            for call in piece.calls:
                if call.name is not None:
                    calls.append(call)
                else:
                    calls[call.index].arguments += call.arguments
        if self._is_content(request, reasoning):
            reasoning, content = "", reasoning
        if not request.include_reasoning:
            reasoning = ""
        self._record(request, bool(calls), is_streaming=False)
        calls = [] if request.tool_choice == "none" else calls
        return (
            reasoning or None,
            content or None,
            [FunctionCall(name=call.name, arguments=call.arguments) for call in calls],
        )

    def parse_delta(self, delta_text, delta_token_ids, request, prompt_token_ids=None, *, finished):
        if self._decoder is None:
            if prompt_token_ids is not None:
                self.set_prompt_token_ids(prompt_token_ids)
            self._decoder = self._new_decoder(request)
        self._last_ids.extend(delta_token_ids)
        self._last_text = (self._last_text + delta_text)[-_LAST_CHARACTERS:]
        pieces = [self._decoder.feed(delta_text)]
        if finished:
            pieces.append(self._finish())
        self._record(request, any(piece.calls for piece in pieces), is_streaming=True)
        return self._delta(pieces, request, finished)

    def name_reasoning(self, message):
        """The message of a whole answer with its reasoning under every name that this server gives it."""
        if message.reasoning and self._names_twice:
            message.reasoning_content = message.reasoning
        return message

    def _new_decoder(self, request) -> AnswerDecoder:
        tools = request.tools or self._tools
        shows_calls = request.tool_choice == "none" and chosen("forbidden_calls") == "text"
        has_reasoning = self._reasoning_parser is not None
        return AnswerDecoder(
            reasoning=has_reasoning and self._starts(),
            think_tags=has_reasoning,
            tools=self._tool_parser is not None and bool(tools) and not shows_calls,
            properties=lambda name: find_tool_properties(tools, name) or {},
            dropped=tuple(self.model_tokenizer.all_special_tokens),
            keep_after_calls=chosen("after_calls") == "keep",
        )

    def _finish(self) -> Piece:
        piece = self._decoder.finish(self._unseen())
        self.call_was_cut = self._decoder.call_is_open
        return piece

    def _unseen(self) -> str:
        """What the last tokens say behind the text: what a stop string has removed."""
        if not self._decoder.call_is_open or not self._last_ids:
            return ""
        said = self.model_tokenizer.decode(list(self._last_ids), skip_special_tokens=False)
        at = said.rfind(self._last_text)
        return said[at + len(self._last_text) :] if at >= 0 else ""

    def _is_content(self, request, reasoning: str) -> bool:
        """Whether an answer that is all reasoning is handed over as content."""
        if not reasoning or not self._decoder.in_reasoning:
            return False
        ended_by_itself = not self._last_ids or self._last_ids[-1] == self._end_of_sequence
        return ended_by_itself and (not request.include_reasoning or self._unclosed_is_content)

    def _delta(self, pieces: list[Piece], request, finished: bool) -> DeltaMessage | None:
        reasoning = "".join(piece.reasoning for piece in pieces)
        content = "".join(piece.content for piece in pieces)
        if reasoning and (not request.include_reasoning or self._unclosed_is_content):
            self._hidden.append(reasoning)
            reasoning = ""
        if self._hidden and (finished or not self._decoder.in_reasoning):
            held, self._hidden = "".join(self._hidden), []
            if finished and self._is_content(request, held):
                content = held
            elif request.include_reasoning:
                reasoning = held
        calls = [] if request.tool_choice == "none" else [_delta_of(call) for piece in pieces for call in piece.calls]
        fields = {"reasoning": reasoning, "content": content, "tool_calls": calls}
        if self._names_twice:
            fields["reasoning_content"] = reasoning
        fields = {name: value for name, value in fields.items() if value}
        return DeltaMessage(**fields) if fields else None

    def _record(self, request, called: bool, is_streaming: bool) -> None:
        if self._tool_parser is not None and request.tool_choice != "none":
            record_tool_parser_invocation(is_tool_called=called, is_streaming=is_streaming, request=request)

    # -- usage

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens before the end of the reasoning; vLLM asks again and again with ever more of one answer."""
        if self._reasoning_parser is None or not self._starts():
            return 0
        if len(token_ids) < self._counted:
            self._counted, self._reasoning_tokens, self._count_is_final = 0, 0, False
        ends = (self._end_think, self._end_of_sequence)
        while self._counted < len(token_ids) and not self._count_is_final:
            token = token_ids[self._counted]
            self._counted += 1
            self._count_is_final = token in ends
            self._reasoning_tokens += not self._count_is_final
        return self._reasoning_tokens


def _delta_of(call: CallPiece) -> DeltaToolCall:
    if call.name is None:
        return DeltaToolCall(index=call.index, function=DeltaFunctionCall(arguments=call.arguments))
    function = DeltaFunctionCall(name=call.name, arguments=call.arguments)
    return DeltaToolCall(index=call.index, id=make_tool_call_id(), type="function", function=function)
