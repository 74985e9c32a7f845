# SPDX-License-Identifier: Apache-2.0
"""An answer of DeepSeek V4 or V4.1, piece by piece, into reasoning, content and tool calls.

The result does not depend on how the answer is cut into pieces, and a whole answer is one piece: streamed and whole
answers are equal because they are read by the same code. Time is linear in the length of the answer.

What becomes of markup that is not as it should be:

    a block that is opened and closed with nothing inside      vanishes; the text around it stays
    an opening tag that no call follows                        is text, and so is the closing tag that belongs to it
    a closing tag of nothing                                   vanishes
    an invoke outside a block                                  is a call, but not inside reasoning
    an invoke without parameters whose body is a JSON object   is a call with that object
    an invoke with another body                                is text
    a parameter that does not parse                            is text, and its call is never closed
    text between parameters, or between calls in a block       is content; a stream has it at its end
    a call that ends with the answer                           keeps its JSON open, unless only end tags are missing
    <think> or </think> before the first word                  vanishes, later it is text
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .arguments import Arguments, as_object
from .markup import DSML, LONGEST_TAG, TAIL, Reader, Tag, closing, held_back

_BLANK = " \t\r\n"
_OPENING_KINDS = ("block", "invoke", "parameter")
_DSML_KINDS = ("block", "block_end", "invoke", "invoke_end", "parameter", "parameter_end")
_IN_CALL = Reader(("parameter", "invoke_end", "block_end", "invoke", "parameter_end"))
_BEHIND_CALL = Reader(("invoke", "block", "block_end", "invoke_end", "parameter_end"))
_IN_BLOCK = Reader(("invoke", "block_end"))
_CLOSING = f"</{DSML}"


@dataclass
class CallPiece:
    """What a piece adds to one call.

    Attributes:
        index: of the call in the answer.
        name: of the tool, with the first piece only; else None.
        arguments: text to append to the arguments.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Piece:
    """What one piece of an answer adds.

    Attributes:
        reasoning, content: text to append.
        calls: one entry for each call that something is added to, in order.
    """

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class AnswerDecoder:
    """Reads one answer.

    Args:
        reasoning: the prompt has opened the reasoning.
        think_tags: `<think>` and `</think>` mean something.
        tools: DSML means something.
        properties: of a tool's name: the `properties` of its schema, empty if unknown.
        dropped: texts that are never shown, such as the end-of-sequence token's.
        keep_after_calls: text behind a closed tool block is content.

    Attributes:
        in_reasoning: nothing has ended the reasoning yet.
        calls: number of calls begun so far.
        call_is_open: the last call is not complete; after `finish`: it never will be.
    """

    def __init__(
        self,
        *,
        reasoning: bool,
        think_tags: bool = True,
        tools: bool = True,
        properties: Callable[[str], Mapping] = lambda name: {},
        dropped=(),
        keep_after_calls: bool = False,
    ):
        kinds = (*(("think", "think_end") if think_tags else ()), *(_DSML_KINDS if tools else ()))
        self._reader = Reader(kinds, dropped) if kinds or dropped else None
        self._properties, self._keep_after_calls = properties, keep_after_calls
        self.in_reasoning, self.calls, self.call_is_open = reasoning, 0, False
        self._buffer, self._offset, self._final = "", 0, False
        self._step = self._text
        self._said, self._held = False, []  # since the last change between reasoning and content
        self._shown = Counter()  # opening tags that were shown as text, by kind
        self._in_block = False
        self._reasoning, self._content, self._calls = [], [], {}
        # Content behind the start of a call waits for the end: some clients cannot take it while a call is open.
        self._late: list[str] = []

    def feed(self, text: str) -> Piece:
        """What `text`, the next of the answer, adds."""
        self._buffer = self._buffer[self._offset :] + text
        self._offset = 0
        while self._step():
            pass
        return self._take()

    def finish(self, unseen: str = "") -> Piece:
        """What the end of the answer adds.

        Args:
            unseen: text that the model wrote behind it and a stop string removed; it may close the last call.
        """
        self._final = True
        while self._step():
            pass
        if self.call_is_open:
            self._end_of_open_call(unseen)
        self._content += self._late + self._held
        return self._take()

    def _take(self) -> Piece:
        piece = Piece("".join(self._reasoning), "".join(self._content), list(self._calls.values()))
        self._reasoning, self._content, self._calls = [], [], {}
        return piece

    # -- reasoning and content. A step returns whether another can follow.

    def _text(self) -> bool:
        """Text up to the next tag."""
        at = self._say_up_to_tag(self._say)
        if at is None:
            return False
        tag = self._reader.at(self._buffer, at)
        if tag is None:
            self._say("<")
            self._offset += 1
        elif not tag.kind:
            return self._begun_tag(self._say)
        elif tag.kind == "block":
            return self._block(tag)
        elif tag.kind == "invoke" and not self.in_reasoning:
            self._begin_call(tag)
        else:
            self._offset = tag.end
            self._tag_in_text(tag.kind, self._buffer[at : tag.end])
        return True

    def _say_up_to_tag(self, say: Callable[[str], None]) -> int | None:
        """Say what stands before the next "<" and return where that is; None if there is none."""
        at = self._buffer.find("<", self._offset) if self._reader else -1
        end = len(self._buffer) if at < 0 else at
        say(self._buffer[self._offset : end])
        self._offset = end
        return None if at < 0 else at

    def _tag_in_text(self, kind: str, text: str) -> None:
        if kind in ("think", "think_end"):
            if kind == "think_end" and self.in_reasoning:
                self._turn(False)
            elif self._said:
                self._say(text)
            elif kind == "think":
                self._turn(True)
        elif kind in _OPENING_KINDS:
            self._shown[kind] += 1
            self._say(text)
        elif self._shown[kind.removesuffix("_end")]:
            self._shown[kind.removesuffix("_end")] -= 1
            self._say(text)

    def _begun_tag(self, say: Callable[[str], None]) -> bool:
        """The text ends inside a tag: wait for more; at the end of the answer say what need not be one."""
        if self._final:
            begun = self._buffer[self._offset :]
            self._offset = len(self._buffer)
            say("" if begun.startswith(("<｜", "</｜")) else begun)
        return False

    def _block(self, tag: Tag) -> bool:
        """A block opens if a call or its own end follows; else the tag was only mentioned."""
        start = self._offset
        inside = self._past_blanks(tag.end)
        near = inside - start < LONGEST_TAG
        ends = inside == len(self._buffer)
        following = _IN_BLOCK.at(self._buffer, inside) if near and not ends else None
        if near and (ends or (following and not following.kind)):
            return self._begun_tag(self._say)
        if following is None:
            self._offset = tag.end
            self._tag_in_text("block", self._buffer[start : tag.end])
        elif following.kind == "block_end":
            self._offset = following.end
        else:
            self._in_block = True
            self._begin_call(following)
        return True

    def _say(self, text: str) -> None:
        if not text:
            return
        blank = text.isspace()
        if self.in_reasoning:
            self._reasoning.append(text)
        elif blank and not self._said:
            self._held.append(text)
        else:
            # Blank lines before a tool block belong to the block, and so does a content that is blank altogether.
            text = "".join(self._held) + text
            end = len(text) - min(2, len(text) - len(text.rstrip("\n")))
            (self._late if self.calls else self._content).append(text[:end])
            self._held = [text[end:]]
        self._said = self._said or not blank

    def _turn(self, to_reasoning: bool) -> None:
        """From content to reasoning, or back."""
        if to_reasoning != self.in_reasoning:
            self.in_reasoning, self._said, self._held = to_reasoning, False, []

    # -- calls

    def _begin_call(self, tag: Tag) -> None:
        """A call opens at the offset; its name is held until its body looks like one."""
        self._opening = self._buffer[self._offset : tag.end]
        self._offset = tag.end
        self._name, self._arguments, self._broken = tag.name.strip(), None, False
        self.call_is_open, self._step = True, self._call

    def _announce(self) -> None:
        if self._arguments is None:
            self._turn(False)
            self._held = []
            self._arguments = Arguments(self._properties(self._name))
            self._calls[self.calls] = CallPiece(self.calls, self._name)
            self.calls += 1

    def _write(self, text: str) -> None:
        if text:
            index = self.calls - 1
            self._calls.setdefault(index, CallPiece(index)).arguments += text

    def _call(self) -> bool:
        """Between the parameters of a call."""
        at = self._past_blanks(self._offset)
        self._opening += self._buffer[self._offset : at]
        self._offset = at
        if at == len(self._buffer):
            return False
        tag = _IN_CALL.at(self._buffer, at)
        if tag is None:
            self._no_parameter()
        elif not tag.kind:
            return False
        elif tag.kind == "parameter":
            self._announce()
            self._write(self._arguments.open(tag.name, tag.string))
            self._closing = closing(tag.spelling)
            self._offset, self._step = tag.end, self._value
        elif tag.kind == "parameter_end":
            self._offset = tag.end
        else:
            self._end_call()
            self._offset = at if tag.kind == "invoke" else tag.end
            self._in_block = self._in_block and tag.kind != "block_end"
        return True

    def _no_parameter(self) -> None:
        """Something else than a parameter: before the first, this is no call in DSML; later, it is text in one."""
        if self._arguments is not None:
            self._step = self._text_in_call
        elif self._buffer[self._offset] == "{":
            self._body, self._step = [], self._json_body
        else:
            self._no_call(self._opening)

    def _no_call(self, text: str) -> None:
        """What looked like a call is text: its opening tags, and what `text` has behind them."""
        self.call_is_open = False
        if self.calls:
            self._say_behind_call(text)
            self._step = self._text_behind_call
        else:
            self._shown["invoke"] += 1
            self._shown["block"] += self._in_block
            self._in_block, self._step = False, self._text
            self._say(text)

    def _text_in_call(self) -> bool:
        return self._stray_text(_IN_CALL, self._say, self._call)

    def _text_behind_call(self) -> bool:
        return self._stray_text(_BEHIND_CALL, self._say_behind_call, self._between)

    def _stray_text(self, reader: Reader, say: Callable[[str], None], then: Callable[[], bool]) -> bool:
        """Text where only tags belong, up to one."""
        at = self._say_up_to_tag(say)
        if at is None:
            return False
        tag = reader.at(self._buffer, at)
        if tag is None:
            # What wanted to be a parameter may be missing from the arguments now.
            self._broken = self._broken or self._buffer.startswith((f"<{DSML}", _CLOSING), at)
            say("<")
            self._offset += 1
        elif not tag.kind:
            return self._begun_tag(say)
        else:
            self._step = then
        return True

    def _json_body(self) -> bool:
        """The body of a call that is written as one JSON object, up to the closing tag."""
        start = self._offset
        end = self._buffer.find(_CLOSING, start)
        if end < 0:
            self._offset = held_back(self._buffer, start, _CLOSING)
            self._body.append(self._buffer[start : self._offset])
            return False
        self._body.append(self._buffer[start:end])
        self._offset = end
        tag = _IN_CALL.at(self._buffer, end)
        if tag is not None and not tag.kind:
            return False
        if tag is None or tag.kind != "invoke_end":
            self._body.append("<")
            self._offset += 1
            return True
        body = "".join(self._body)
        arguments = as_object(body)
        if arguments is None:
            self._no_call(self._opening + body)
            return True
        self._announce()
        self._write(arguments)
        self._offset = tag.end
        self.call_is_open, self._step = False, self._between
        return True

    def _value(self) -> bool:
        """The value of a parameter: everything up to the closing tag in the spelling of the opening one."""
        start = self._offset
        end = self._buffer.find(self._closing, start)
        if end < 0:
            self._offset = min(held_back(self._buffer, start, self._closing), self._tail(start))
            self._write(self._arguments.add(self._buffer[start : self._offset]))
            return False
        self._write(self._arguments.add(self._buffer[start:end]) + self._arguments.close())
        self._offset, self._step = end + len(self._closing), self._call
        return True

    def _tail(self, start: int) -> int:
        """Where the closing tags of call and block begin that the text ends with, or may come to end with."""
        at = self._buffer.find(_CLOSING, max(start, len(self._buffer) - LONGEST_TAG))
        while at >= 0 and TAIL.fullmatch(self._buffer, at, partial=True) is None:
            at = self._buffer.find(_CLOSING, at + 1)
        return at if at >= 0 else len(self._buffer)

    def _end_call(self) -> None:
        self._announce()
        if not self._broken:
            self._write(self._arguments.end())
        self.call_is_open, self._step = self._broken, self._between

    def _between(self) -> bool:
        """Behind a call: another one, the end of the block, or text that does not belong there."""
        at = self._offset = self._past_blanks(self._offset)
        if at == len(self._buffer):
            return False
        tag = _BEHIND_CALL.at(self._buffer, at)
        if tag is None:
            self._step = self._text_behind_call
        elif not tag.kind:
            return self._begun_tag(self._say_behind_call)
        elif tag.kind == "invoke":
            self._begin_call(tag)
        else:
            self._offset = tag.end
            self._in_block = tag.kind == "block" or (self._in_block and tag.kind != "block_end")
        return True

    def _say_behind_call(self, text: str) -> None:
        if self._in_block or self._keep_after_calls:
            self._say(text)

    def _end_of_open_call(self, unseen: str) -> None:
        """The answer ended inside a call: it is complete if nothing but its closing tags is missing."""
        rest = self._buffer[self._offset :]
        if self._step == self._value:
            if TAIL.fullmatch(rest):
                self._write(self._arguments.close())
                return self._end_call()
            self._write(self._arguments.add("" if rest.startswith("</｜") else rest))
        elif self._step == self._call and not self._broken:
            tag = _IN_CALL.at((rest + unseen).lstrip(_BLANK), 0)
            if tag is not None and tag.kind in ("invoke_end", "block_end"):
                return self._end_call()
        self._announce()
        if not self._broken:
            self._write(self._arguments.cut())
        self.call_is_open = True

    def _past_blanks(self, start: int) -> int:
        end = start
        while end < len(self._buffer) and self._buffer[end] in _BLANK:
            end += 1
        return end
