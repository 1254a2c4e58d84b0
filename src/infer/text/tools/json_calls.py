"""Calls written as JSON: one object, several, or a list of them.

`{"name": "f", "arguments": {…}}` is the usual object; Llama writes `parameters`, some models put
OpenAI's `{"type": "function", "function": {…}}` around it, and some write the arguments as text.
`BracketEnd` finds where a value that is still being written ends, in time linear in its length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infer.text.tools.call import Block, ToolCall, arguments_of, made_call

_BRACKETS = {
    '"': re.compile(r"""["{}\[\]()]"""),
    "\"'": re.compile(r"""["'{}\[\]()]"""),
}
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
NOT_SPACE = re.compile(r"\S")
_SEPARATORS = ";, \t\r\n"
_NOT_ARGUMENTS = {"name", "type", "id", "function"}
_QUOTE_OR_ESCAPE = re.compile(r'\\.|"', re.DOTALL)


class BracketEnd:
    """Where the first bracket of a growing text is closed; brackets in strings do not count."""

    def __init__(self, quotes: str = '"', start: int = 0) -> None:
        """`start`: where it begins to look."""
        self._bracket = _BRACKETS[quotes]
        self._at = start
        self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int:
        """The place behind the closing bracket, or -1 if it has not come yet.

        `text` begins with the text of the last call.
        """
        while True:
            match = (_IN_STRING[self._quote] if self._quote else self._bracket).search(
                text, self._at
            )
            if match is None:
                self._at = len(text)
                return -1
            char, self._at = match[0], match.end()
            if char == "\\":
                if self._at == len(text):  # what it escapes is still to come
                    self._at -= 1
                    return -1
                self._at += 1
            elif self._quote:
                self._quote = ""
            elif char in "\"'":
                self._quote = char
            else:
                self._depth += 1 if char in "{[(" else -1
                if self._depth <= 0:
                    self._at = match.start()  # asked again, it says the same
                    self._depth = 1
                    return match.end()


def in_json_string(text: str) -> bool:
    """Whether the text ends inside a string of JSON."""
    quotes: list[str] = _QUOTE_OR_ESCAPE.findall(text)
    return quotes.count('"') % 2 == 1


def read_json(text: str, *, strict: bool = False) -> list[ToolCall] | None:
    """The calls in a text of nothing but JSON: objects with semicolons or white space between
    them, and lists of objects.

    `strict`: the arguments must be there. Otherwise an object of a name alone is a call without
    arguments; but other members are never dropped, so an object that has them is no call.
    """
    decoder, calls, at = json.JSONDecoder(), list[ToolCall](), 0
    text = text.strip()
    while at < len(text):
        if text[at] not in "{[":
            return None
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        for each in value if isinstance(value, list) else [value]:
            call = _call_of(each, strict)
            if call is None:
                return None
            calls.append(call)
        while at < len(text) and text[at] in _SEPARATORS:
            at += 1
    return calls or None


def _call_of(value: Any, strict: bool) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):  # {"type": "function", "function": {"name": …}}
        return _call_of(inner, strict) if value.keys() <= {"id", "type", "function"} else None
    name = value.get("name", inner)
    for key in ("arguments", "parameters"):
        if key in value:
            return made_call(name, {} if value[key] is None else value[key])
    return None if strict or value.keys() - _NOT_ARGUMENTS else made_call(name, {})


def write_json(calls: Sequence[ToolCall], arguments: str = "arguments") -> list[str]:
    """Each call as an object; the member with its arguments has the name `arguments`."""
    return [
        json.dumps({"name": call.name, arguments: arguments_of(call)}, ensure_ascii=False)
        for call in calls
    ]


class JsonList:
    """Reads one JSON value behind a mark that has no closing one, as `functools[…]`."""

    def __init__(self, before: str = "") -> None:
        """`before` belongs to the value and is a part of the mark."""
        self._before = before
        self._bracket = BracketEnd()

    def read(self, text: str, *, end: bool) -> Block | None:
        if not self._before:
            first = NOT_SPACE.search(text)
            if first is None and not end:
                return None
            if first is None or first[0] not in "[{":
                return Block(0, None)
        whole = self._before + text
        at = self._bracket.find(whole)
        if at < 0:
            return Block(len(text), None) if end else None
        return Block(at - len(self._before), read_json(whole[:at]))
