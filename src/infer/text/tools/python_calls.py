"""Calls written as Python: `[weather(city="Ulm", days=3), time()]`, or one call without a list.

Llama 3.2 and Gemma write such calls. The parser is our own and reads literals only. Python's own
compiler may crash the process on deeply nested text, and models may generate any text.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from infer.text.tools.argument_text import BROKEN, WHOLE, ArgumentPiece, in_json, read_tokens
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


_VALUE = r"(?:[\"'\[({]|[-+]?\.?\d|(?:True|true|False|false|None|null)[\s,)])"
HEAD = rf"(?P<name>(?!print\s*\(){NAME.pattern})\s*\((?=\s*(?:\)|[A-Za-z_]\w*\s*=\s*{_VALUE}))"
"""Pattern of a call up to its arguments: nothing, or one that a literal may be."""
_MAX_TOKEN_CHARS = 512
_CLOSED_BY = {"call": ")", "(": ")", "[": "]", "{": "}"}
_SIGNS = ("-", "+", ".", "-.", "+.")
_KEY_BEGUN = re.compile(r"[A-Za-z_]\w*\s*=?")
_IN_QUOTES = {quote: re.compile(rf"{quote}|\\") for quote in ('"""', "'''", '"', "'")}


class PythonText:
    """Reads keyword arguments up to the bracket that closes them; see `ArgumentText`."""

    def __init__(self) -> None:
        self._stack = list[str]()
        """Brackets around this place; the first one of "(" is the call's."""
        self._expects = "item"
        """"item", "colon" (behind a dict's key), "value" (behind a key) or "comma"."""
        self._is_first = True
        """Whether nothing is in the innermost bracket yet."""
        self._is_key = False
        """Whether the string that is being read is a key of a dict."""
        self._keys = set[str]()
        self._quote = ""

    def read(self, text: str, *, end: bool) -> ArgumentPiece:
        """See `ArgumentText`. `text` begins behind the call's opening bracket."""
        begun = ""
        if not self._stack:
            self._stack.append("call")
            begun = "{"
        return read_tokens(self._step, text, end, begun)

    def _step(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        """See `read_tokens`."""
        if self._quote:
            return self._in_string(text, at, end)
        begin, at = at, _SPACE.match(text, at).end()  # type: ignore[union-attr]
        char, inner = text[at : at + 1], self._stack[-1]
        if not char:
            return ArgumentPiece(at, "", "") if at > begin else None
        if self._expects in ("item", "comma") and char == _CLOSED_BY[inner]:
            return self._close(at)
        if self._expects in ("comma", "colon"):
            mark, written = (",", "") if self._expects == "comma" else (":", ": ")
            if char != mark:
                return ArgumentPiece(at, "", BROKEN)
            self._expects = "item" if mark == "," else "value"
            return ArgumentPiece(at + 1, written, "")
        if self._expects == "item" and inner == "call":
            return self._keyword(text, at, end)
        return self._value(text, at, end)

    def _close(self, at: int) -> ArgumentPiece:
        inner = self._stack.pop()
        self._expects, self._is_first = "comma", False
        closing = "}" if inner in ("call", "{") else "]"
        return ArgumentPiece(at + 1, closing, "" if self._stack else WHOLE)

    def _separator(self) -> str:
        before = "" if self._is_first or self._expects == "value" else ", "
        self._is_first = False
        return before

    def _keyword(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        rest = text[at : at + _MAX_TOKEN_CHARS]
        begun = _KEY_BEGUN.fullmatch(rest)
        if begun is not None and not end and len(rest) < _MAX_TOKEN_CHARS:
            return None
        key = _KEYWORD.match(text, at)
        if key is None or key[1] in self._keys:
            return ArgumentPiece(at, "", BROKEN)
        self._keys.add(key[1])
        written = f"{self._separator()}{json.dumps(key[1], ensure_ascii=False)}: "
        self._expects = "value"
        return ArgumentPiece(key.end(), written, "")

    def _value(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        char, is_key = text[at], self._stack[-1] == "{" and self._expects == "item"
        if char in "\"'":
            return self._open_string(text, at, end, is_key=is_key)
        if is_key:
            return ArgumentPiece(at, "", BROKEN)
        if char in "[({":
            if len(self._stack) > MAX_DEPTH:
                return ArgumentPiece(at, "", BROKEN)
            before = self._separator()
            self._stack.append(char)
            self._expects, self._is_first = "item", True
            return ArgumentPiece(at + 1, before + ("{" if char == "{" else "["), "")
        return self._scalar(text, at, end)

    def _scalar(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        match = _NUMBER.match(text, at) or _WORD.match(text, at)
        if match is None and text[at:] in _SIGNS and not end:
            return None
        if match is None or match.end() - at > _MAX_TOKEN_CHARS:
            return ArgumentPiece(at, "", BROKEN)
        if not end and len(text) - match.end() < 3:  # 1.5e-3 could go on at each place
            return None
        written = _json_of(match[0])
        if written is None:
            return ArgumentPiece(at, "", BROKEN)
        written = self._separator() + written
        self._expects = "comma"
        return ArgumentPiece(match.end(), written, "")

    def _open_string(self, text: str, at: int, end: bool, *, is_key: bool) -> ArgumentPiece | None:
        quote = text[at] * 3
        if not text.startswith(quote, at):
            if not end and quote.startswith(text[at:]):
                return None  # it could be one of three quotes
            quote = text[at]
        self._quote, self._is_key = quote, is_key
        return ArgumentPiece(at + len(quote), self._separator() + '"', "")

    def _in_string(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        quote = self._quote
        ending = _IN_QUOTES[quote].search(text, at)
        # Quotes at the end may be the first ones of three.
        sure = len(text) if end or len(quote) == 1 else max(at, len(text) - 2)
        stop = sure if ending is None else ending.start()
        if stop > at:
            return ArgumentPiece(stop, in_json(text[at:stop]), "")
        if ending is None:
            return None
        if ending[0] == quote:
            self._quote = ""
            self._expects = "colon" if self._is_key else "comma"
            return ArgumentPiece(ending.end(), '"', "")
        if len(text) - at < 10 and not end:
            return None
        match = _ESCAPE.match(text, at)
        try:
            written = None if match is None else in_json(_unescaped(match[1]))
        except (ValueError, OverflowError):
            written = None
        if match is None or written is None:
            return None if end else ArgumentPiece(at, "", BROKEN)
        return ArgumentPiece(match.end(), written, "")


def _json_of(token: str) -> str | None:
    """A word or number of Python as JSON; None if it is no literal."""
    if token in _WORDS:
        return json.dumps(_WORDS[token])
    digits = token.replace("_", "")
    try:
        number = float(digits) if set(digits) & set(".eE") else int(digits)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) else None


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
        calls = []
        if alone and not self._text.startswith("["):
            while self._at < len(self._text):
                calls.append(self._call())
                while self._accept(";"):
                    pass
            return calls or None
        self._expect("[")
        while not self._accept("]"):
            calls.append(self._call())
            if not self._accept(","):
                self._expect("]")
                break
        self._skip()
        if self._at < len(self._text):
            raise _NoCallError
        return calls or None

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
        is_there = self._text.startswith(char, self._at)
        self._at += is_there
        return is_there

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
