"""Reading an answer that consists of calls without a mark, in JSON or Python.

Only its beginning identifies such an answer, so the text is held back. It becomes content as soon
as it cannot be calls of the request's tools: at another name, at another first member of an object,
or at the end of a value that is not a call. No text is lost then. With the name of one of the tools
and the beginning of its arguments it is a call, which `StreamedCalls` reads; `BareCalls` reads what
begins in another way.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from infer.text.tools import python_calls
from infer.text.tools.call import Block, Reading, ToolCall
from infer.text.tools.json_calls import NOT_SPACE, BracketEnd, read_json
from infer.text.tools.python_calls import NAME, PythonText, read_python
from infer.text.tools.streamed_calls import JSON_HEAD, Schema, StreamedCalls, Syntax, Tail

FENCES = ("", "json", "python", "tool_code", "tool_call", "tool_calls")
"""Languages of a code block that may hold calls; they follow its three backticks."""
_MAX_FENCE_CHARS = 16
"""Maximum length of a code block's first line."""
_MAX_HEAD_CHARS = 2048
"""Number of characters that are examined before a value is complete.

A value with a longer name is examined when it is complete.
"""
_MEMBERS = ("name", "type", "function", "arguments", "parameters", "id")
_NAMED = re.compile(r'"(?:name|function)"\s*:\s*"([^"\\]*)(["\\]?)')
_FENCED = re.compile(r"```([a-z_]*)[ \t]*\n")
_BEHIND = "{[;,`<"


_LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_")
_FENCE = rf"```(?:{'|'.join(FENCES)})[ \t]*\n\s*"


def _json_tail(head: re.Match[str]) -> Tail:
    closing = "```" if head["fence"] else ""
    return Tail(("}", "]", ",", ";"), closing, starts=("{", "["))


def _python_tail(head: re.Match[str]) -> Tail:
    if head["fence"]:
        return Tail((",", ";", "]"), "```", starts=_LETTERS)
    if head["list"]:
        return Tail((",",), "]", starts=_LETTERS)
    return Tail((",", ";"), starts=_LETTERS)


def _syntaxes(begin: str) -> tuple[Syntax, Syntax]:
    """Calls in JSON and in Python; `begin`: pattern of what precedes the first Python call."""
    pattern = rf"\s*(?P<fence>{_FENCE})?(?:\[\s*)?{JSON_HEAD}"
    json = Syntax(re.compile(pattern), _json_tail, only_known=True)
    pattern = rf"\s*{begin}{python_calls.HEAD}"
    further = re.compile(rf"\s*{python_calls.HEAD}")
    python = Syntax(
        re.compile(pattern), _python_tail, read_keywords, only_known=True, further=further
    )
    return json, python


def read_keywords(schema: Schema | None) -> PythonText:
    """The reader of a Python call's arguments, whose values have types."""
    return PythonText()


def python_until(closing: str) -> Syntax:
    """Calls in Python, one, several or a list of them, up to a closing mark."""
    tail = Tail((",", ";", "]"), closing, starts=_LETTERS)
    head = re.compile(rf"\s*(?:\[\s*)?{python_calls.HEAD}")
    return Syntax(head, lambda head: tail, read_keywords)


_MARKED = _syntaxes(rf"(?P<fence>{_FENCE})?(?P<list>\[\s*)?")
_ALONE = _syntaxes(rf"(?=```|\[)(?P<fence>{_FENCE})?(?P<list>\[\s*)?")


def bare_calls(names: Collection[str] | None, *, marked: bool = False) -> Reading:
    """The parser of calls without a mark, or, if `marked`, up to the end of the answer."""
    whole = BareCalls(names, marked=marked)
    return StreamedCalls(_MARKED if marked else _ALONE, whole, names)


class BareCalls:
    """Reads a whole answer, or the text from a mark to the end of the answer, at its end."""

    def __init__(self, names: Collection[str] | None, *, marked: bool = False) -> None:
        """`names`: names of the request's tools; None: any name is accepted.

        `marked`: the text follows a mark. Then a Python call needs no list around it, and a JSON
        call needs no arguments.
        """
        self._names = names
        self._marked = marked
        self._bracket: BracketEnd | None = None
        self._value_end = -1

    def read(self, text: str, *, end: bool) -> Block | None:
        if not self._is_possible(text):
            return Block(0, None)
        if not end:
            return None
        calls = read_bare(text, marked=self._marked)
        if calls is None or not self._are_known(calls):
            return Block(0, None)
        return Block(len(text), calls)

    def _are_known(self, calls: Collection[ToolCall]) -> bool:
        return self._names is None or all(call.name in self._names for call in calls)

    def _is_possible(self, text: str) -> bool:
        start = NOT_SPACE.search(text)
        if start is None:
            return True
        seen = text[start.start() : start.start() + _MAX_HEAD_CHARS]
        fence = _FENCED.match(seen)
        if fence is not None and fence[1] not in FENCES:
            return False
        if fence is None and (seen.startswith("```") or "```".startswith(seen)):
            return "\n" not in seen and len(seen) <= _MAX_FENCE_CHARS
        first = seen[fence.end() :].lstrip() if fence else seen
        if not first:
            return True
        if first[0] not in "{[":
            return (self._marked or fence is not None) and self._may_name(first)
        at = start.start() + len(seen) - len(first)
        return self._may_open(first) and self._value_is_possible(text, at)

    def _may_open(self, first: str) -> bool:
        """Whether a value that begins with these characters may be a call."""
        inside = first[1:].lstrip() if first[0] == "[" else first
        if not inside:
            return True
        if inside[0] != "{":
            return self._may_name(inside)
        member = inside[1:].lstrip()
        if not member:
            return True
        if not any(_one_begins_other(f'"{name}"', member) for name in _MEMBERS):
            return False
        named = _NAMED.match(member)
        if named is None or self._names is None:
            return True
        spelled, closed = named[1], named[2] == '"'
        return any(name == spelled if closed else name.startswith(spelled) for name in self._names)

    def _may_name(self, text: str) -> bool:
        if _one_begins_other("print(", text):
            return True
        if self._names is not None:
            return any(_one_begins_other(f"{name}(", text) for name in self._names)
        name = NAME.match(text)
        return name is not None and (name.end() == len(text) or text[name.end()] == "(")

    def _value_is_possible(self, text: str, start: int) -> bool:
        """Whether the first value is incomplete, or is calls that only calls may follow."""
        if self._value_end < 0:
            if self._bracket is None:
                is_json = re.match(r"\[?\s*\{", text[start : start + 64]) is not None
                if not is_json and not text[start + 1 :].lstrip():
                    return True  # a list whose first item has not come yet
                self._bracket = BracketEnd('"' if is_json else "\"'", start)
            at = self._bracket.find(text)
            if at < 0:
                return True
            calls = read_json(text[start:at], strict=not self._marked) or read_python(
                text[start:at]
            )
            if calls is None or not self._are_known(calls):
                return False
            self._value_end = at
        behind = NOT_SPACE.search(text, self._value_end)
        return behind is None or behind[0] in _BEHIND


def _one_begins_other(first: str, other: str) -> bool:
    """Whether one of the texts is a prefix of the other."""
    return first.startswith(other) or other.startswith(first)


def read_bare(text: str, *, marked: bool = False) -> list[ToolCall] | None:
    """The calls of a whole answer, which may be a code block; None if it is not calls.

    `marked`: as for `BareCalls`.
    """
    text = text.strip()
    fence = _FENCED.match(text)
    if fence is not None:
        if fence[1] not in FENCES or not text.endswith("```") or len(text) < fence.end() + 3:
            return None
        text = text[fence.end() : -3].strip()
    alone = marked or fence is not None
    return read_json(text, strict=not marked) or read_python(text, alone=alone)
