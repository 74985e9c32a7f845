# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call as JSON text that only ever grows.

A string parameter is written out as it comes, any other once it is complete and known to be JSON. Values are
passed on as the model wrote them: string="true" is a string whatever a schema says, and JSON keeps its spelling.
"""

import json
import re
from collections.abc import Mapping


def is_json(text: str) -> bool:
    """Whether `text` is JSON by the standard: NaN and Infinity are not."""
    try:
        # Numbers are left as text: their value is the client's matter, and Python limits the digits of an int.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str):
    raise ValueError(constant)


def quoted(text: str) -> str:
    """`text` inside a JSON string, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Arguments:
    """Writes the JSON object of one call; every method returns the text to append to it.

    Args:
        properties: the `properties` of the tool's schema; empty if there is none.
    """

    def __init__(self, properties: Mapping):
        self._properties = properties
        self._opened = self._is_string = self._wraps = False
        self._name, self._text = "", []
        self._wrapper: tuple[str, bool, str] | None = None

    def open(self, name: str, string: str | None) -> str:
        """A parameter begins.

        Args:
            name: its name.
            string: its attribute `string`; None if it has none, and the schema decides.
        """
        text = self._release()
        if string is None:
            schema = self._properties.get(name)
            self._is_string = isinstance(schema, Mapping) and schema.get("type") == "string"
        else:
            self._is_string = string.lower() == "true"
        self._name, self._text = name, []
        # V4.1's own encoder writes what is not an object as one parameter of this name; the tool may not know it.
        alone = not self._opened and bool(self._properties) and name not in self._properties
        self._wraps = alone and name in ("arguments", "input")
        return text if self._wraps else text + self._key(name) + '"' * self._is_string

    def add(self, text: str) -> str:
        """More of the value of the open parameter."""
        if self._is_string and not self._wraps:
            return quoted(text)
        self._text.append(text)
        return ""

    def close(self) -> str:
        """The open parameter ends."""
        if self._wraps:
            self._wraps, self._wrapper = False, (self._name, self._is_string, "".join(self._text))
            return ""
        return '"' if self._is_string else _as_json("".join(self._text))

    def end(self) -> str:
        """The call ends: the rest of the object."""
        if self._wrapper is not None:
            inner = as_object(self._wrapper[2])
            if inner is not None and json.loads(inner, parse_int=str).keys() <= self._properties.keys():
                return inner
        return self._release() + "{" * (not self._opened) + "}"

    def cut(self) -> str:
        """The answer ends inside the call: the object stays open, so that nobody takes it for a whole one."""
        if not self._wraps:
            return self._release() + "{" * (not self._opened)
        return self._key(self._name) + (f'"{quoted("".join(self._text))}' if self._is_string else "")

    def _release(self) -> str:
        """The held parameter, now that it is known to be an ordinary one."""
        if self._wrapper is None:
            return ""
        name, is_string, value = self._wrapper
        self._wrapper = None
        return self._key(name) + (f'"{quoted(value)}"' if is_string else _as_json(value))

    def _key(self, name: str) -> str:
        start = ", " if self._opened else "{"
        self._opened = True
        return f'{start}"{quoted(name)}": '


def as_object(text: str) -> str | None:
    """`text` without blanks around it, if it is a JSON object; else None."""
    text = text.strip()
    return text if text.startswith("{") and is_json(text) else None


def _as_json(value: str) -> str:
    """`value` as it is if it is JSON, else as a string: a bare word, NaN, what is not finished."""
    return value.strip() if is_json(value) else f'"{quoted(value)}"'


class PayloadReader:
    """Reads the text out of `{"input": "<text>"}`, the arguments of a tool that takes no JSON, piece by piece."""

    _HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    # Whole characters and escapes, and both halves of a surrogate pair together.
    _TEXT = re.compile(
        r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*'
    )
    _LONGEST_HEAD = 64

    def __init__(self):
        self._rest, self._inside = "", False

    def read(self, arguments: str) -> str:
        """The text that the next piece of the arguments adds; what is no such object adds nothing."""
        if not self._inside and len(self._rest) > self._LONGEST_HEAD:
            return ""
        self._rest += arguments
        if not self._inside:
            head = self._HEAD.match(self._rest)
            if head is None:
                return ""
            self._inside, self._rest = True, self._rest[head.end() :]
        end = self._TEXT.match(self._rest).end()
        text, self._rest = self._rest[:end], self._rest[end:]
        return json.loads(f'"{text}"', strict=False)
