"""Calls written as JSON: one object, several objects, or a list of objects.

The usual object is `{"name": "f", "arguments": {…}}`. Llama writes `parameters`, some models put
OpenAI's `{"type": "function", "function": {…}}` around it, and some write the arguments as text.
`BracketEnd` finds the end of a value in a growing text, in time linear in its length.
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
"""Pattern of the first character that is not white space."""
_SEPARATORS = ";, \t\r\n"
_NOT_ARGUMENTS = {"name", "type", "id", "function", "tool_name", "tool_call_id"}
_QUOTE_OR_ESCAPE = re.compile(r'\\.|"', re.DOTALL)


class BracketEnd:
    """Finds where the first bracket of a growing text is closed; it ignores brackets in strings."""

    def __init__(self, quotes: str = '"', start: int = 0) -> None:
        """`quotes`: the quotes of strings. `start`: the place at which the search begins."""
        self._bracket = _BRACKETS[quotes]
        self._at = start
        self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int:
        """The place after the closing bracket; -1 if it has not come yet.

        `text` begins with the text of the last call; only what follows it is searched.
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
                if self._at == len(text):  # the escaped character has not come yet
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
                    self._at = match.start()  # a further call finds the same place
                    self._depth = 1
                    return match.end()


def in_json_string(text: str) -> bool:
    """Whether a text of JSON ends inside a string."""
    quotes: list[str] = _QUOTE_OR_ESCAPE.findall(text)
    return quotes.count('"') % 2 == 1


def read_json(text: str, *, strict: bool = False) -> list[ToolCall] | None:
    """The calls in a text that is JSON: objects and lists of objects; None if it is not calls.

    Semicolons, commas or white space may separate them. `strict`: each call must have arguments.
    Otherwise an object that has only a name is a call without arguments. An object with other
    members is not a call, since no member may be dropped.
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
        for item in value if isinstance(value, list) else [value]:
            call = _call_of(item, strict)
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
    name = value.get("name", value.get("tool_name", inner))
    for key in ("arguments", "parameters"):
        if key in value:
            return made_call(name, {} if value[key] is None else value[key])
    return None if strict or value.keys() - _NOT_ARGUMENTS else made_call(name, {})


def write_json(calls: Sequence[ToolCall], arguments: str = "arguments") -> list[str]:
    """The text of each call as a JSON object, whose arguments are in the member `arguments`."""
    return [
        json.dumps({"name": call.name, arguments: arguments_of(call)}, ensure_ascii=False)
        for call in calls
    ]


def write_actions(calls: Sequence[ToolCall]) -> str:
    """The list of calls as Command A writes it."""
    items = [
        {"tool_call_id": str(i), "tool_name": call.name, "parameters": arguments_of(call)}
        for i, call in enumerate(calls)
    ]
    return json.dumps(items, ensure_ascii=False)


class JsonList:
    """Parses one JSON value after a mark that has no closing mark, such as `functools[…]`."""

    def __init__(self, before: str = "") -> None:
        """`before`: the part of the mark that belongs to the value."""
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
