"""Calls written as Python: `[weather(city="Ulm", days=3), time()]`, or one call without a list.

Llama 3.2 and Gemma write such calls. The parser is our own and reads literals only. Python's own
compiler may crash the process on deeply nested text, and models may generate any text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from infer.text.tools.call import ToolCall, arguments_of, made_call

MAX_DEPTH = 64
"""Maximum nesting of lists and dicts in an argument."""
NAME = re.compile(r"[A-Za-z_][\w.\-]*")
"""Pattern of a function's name."""
_CALL = re.compile(rf"\s*({NAME.pattern})\s*\(")
_SPACE = re.compile(r"[ \t\r\n]*")
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_QUOTES = re.compile(r"\"\"\"|'''|\"|'")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.S)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_ESCAPED |= {"\n": "", "\\": "\\", "'": "'", '"': '"'}


class _NoCallError(ValueError):
    """The text is not a call."""


def read_python(text: str, *, alone: bool = False) -> list[ToolCall] | None:
    """The calls in a text that is a list of calls; None if it is not.

    `alone`: the text may also be calls without a list, one after the other.
    """
    try:
        return _Reader(text.strip()).calls(alone)
    except (_NoCallError, ValueError, OverflowError):
        return None


def write_python(calls: Sequence[ToolCall]) -> str:
    """The text of a list of the calls."""
    written = []
    for call in calls:
        pairs = arguments_of(call).items()
        written.append(f"{call.name}({', '.join(f'{key}={value!r}' for key, value in pairs)})")
    return f"[{', '.join(written)}]"


class _Reader:
    """A recursive descent parser of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def calls(self, alone: bool) -> list[ToolCall] | None:
        """The calls of the whole text; `_NoCallError` if it is not calls."""
        found = []
        if alone and not self._text.startswith("["):
            while self._at < len(self._text):
                found.append(self._call())
                while self._accept(";"):
                    pass
            return found or None
        self._expect("[")
        while not self._accept("]"):
            found.append(self._call())
            if not self._accept(","):
                self._expect("]")
                break
        self._skip()
        if self._at < len(self._text):
            raise _NoCallError
        return found or None

    def _call(self) -> ToolCall:
        self._skip()
        name = self._match(NAME)
        if name == "print" and self._text.startswith("(", self._at):
            inner = _CALL.match(self._text, self._at + 1)
            if inner is not None and inner[1] != "print":  # Gemma prints the result of a call
                self._at += 1
                call = self._call()
                self._expect(")")
                self._skip()
                return call
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._accept(")"):
            self._skip()
            key = _KEYWORD.match(self._text, self._at)
            if key is None or key[1] in arguments:
                raise _NoCallError  # positional arguments have no names
            self._at = key.end()
            arguments[key[1]] = self._value(0)
            if not self._accept(","):
                self._expect(")")
                break
        self._skip()
        made = made_call(name, arguments)
        if made is None:
            raise _NoCallError
        return made

    def _value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _NoCallError
        self._skip()
        char = self._text[self._at : self._at + 1]
        if char in ("'", '"'):
            return self._string()
        if char == "{":
            return self._dict(depth)
        if char in ("[", "("):
            self._at += 1
            closing = "]" if char == "[" else ")"
            items = []
            while not self._accept(closing):
                items.append(self._value(depth + 1))
                if not self._accept(","):
                    self._expect(closing)
                    break
            return items
        if number := _NUMBER.match(self._text, self._at):
            self._at = number.end()
            text = number[0].replace("_", "")
            is_whole = not set(text) & set(".eE")
            value = int(text) if is_whole else float(text)
            if not math.isfinite(value):
                raise _NoCallError
            return value
        word = self._match(_WORD)
        if word not in _WORDS:
            raise _NoCallError
        return _WORDS[word]

    def _dict(self, depth: int) -> dict[str, Any]:
        self._expect("{")
        members: dict[str, Any] = {}
        while not self._accept("}"):
            key = self._value(depth + 1)
            self._expect(":")
            if not isinstance(key, str):
                raise _NoCallError
            members[key] = self._value(depth + 1)
            if not self._accept(","):
                self._expect("}")
                break
        return members

    def _string(self) -> str:
        quote = self._match(_QUOTES)
        pieces = []
        while True:
            end = self._text.find(quote, self._at)
            escape = self._text.find("\\", self._at)
            if end < 0:
                raise _NoCallError
            if escape < 0 or end < escape:
                pieces.append(self._text[self._at : end])
                self._at = end + len(quote)
                return "".join(pieces)
            pieces.append(self._text[self._at : escape])
            match = _ESCAPE.match(self._text, escape)
            if match is None:
                raise _NoCallError
            pieces.append(_unescaped(match[1]))
            self._at = match.end()

    def _skip(self) -> None:
        self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise _NoCallError
        self._at = match.end()
        return match[0]

    def _accept(self, char: str) -> bool:
        self._skip()
        found = self._text.startswith(char, self._at)
        self._at += found
        return found

    def _expect(self, char: str) -> None:
        if not self._accept(char):
            raise _NoCallError


def _unescaped(escape: str) -> str:
    if escape in _ESCAPED:
        return _ESCAPED[escape]
    if escape[0] in "xuU":
        return chr(int(escape[1:], 16)) if len(escape) > 1 else "\\" + escape
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    return "\\" + escape
