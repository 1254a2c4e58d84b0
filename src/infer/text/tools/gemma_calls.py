"""Calls as FunctionGemma and Gemma 4 write them: `call:weather{city:<escape>Ulm<escape>,days:3}`.

Keys have no quotes. Strings have special tokens as quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infer.text.tools.argument_text import (
    BROKEN,
    IN_STRING,
    WHOLE,
    ArgumentPiece,
    in_json,
    read_tokens,
)
from infer.text.tools.call import Parse, ToolCall, arguments_of
from infer.text.tools.json_calls import NOT_SPACE, read_json

_CALL = re.compile(r"\s*call:([^\s{}]+)(\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r'([{,]\s*)([A-Za-z_][^\s:{}\[\],"]*)\s*:')

HEAD = re.compile(r'\s*call:(?P<name>[^\s{}<>]+)(?=\{\s*[}A-Za-z_"<])')
"""Pattern of a call up to its arguments."""
_NAME = re.compile(r'[^\s:{}\[\],"<]+')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_MAX_WORD_CHARS = 512
_PUNCTUATION = {"{": "{", "[": "[", "}": "}", "]": "]", ",": ", ", ":": ": "}


class GemmaText:
    """Reads arguments in this syntax up to their closing bracket; see `ArgumentText`.

    A word without quotes that is no value of JSON is a string.
    """

    def __init__(self, quote: str, closing: str) -> None:
        """`quote`: the mark before and after a string. `closing`: the mark after the call, which
        ends a string too."""
        self._quote = quote
        self._closing = closing
        self._depth = 0
        self._inside = ""
        """Quote of the string that is being read."""

    def read(self, text: str, *, end: bool) -> ArgumentPiece:
        """See `ArgumentText`."""
        return read_tokens(self._step, text, end)

    def _step(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        """See `read_tokens`."""
        if self._inside:
            return self._in_string(text, at, end)
        match = NOT_SPACE.search(text, at)
        if match is None:
            return ArgumentPiece(len(text), "", "") if at < len(text) else None
        at, char = match.start(), match[0]
        if char in _PUNCTUATION:
            self._depth += (char in "{[") - (char in "}]")
            return ArgumentPiece(at + 1, _PUNCTUATION[char], "" if self._depth > 0 else WHOLE)
        for quote in (self._quote, '"'):
            if text.startswith(quote, at):
                self._inside = quote
                return ArgumentPiece(at + len(quote), '"', "")
        if char == "<":
            is_begun = self._quote.startswith(text[at:]) and not end
            return None if is_begun else ArgumentPiece(at, "", BROKEN)
        return self._word(text, at, end)

    def _word(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        match = _NAME.match(text, at, at + _MAX_WORD_CHARS)
        if match is None or match.end() == at + _MAX_WORD_CHARS:
            return ArgumentPiece(at, "", BROKEN)
        behind = NOT_SPACE.search(text, match.end(), match.end() + _MAX_WORD_CHARS)
        if behind is None and len(text) - match.end() < _MAX_WORD_CHARS and not end:
            return None
        word, is_key = match[0], behind is not None and behind[0] == ":"
        is_value = word in ("true", "false", "null") or _NUMBER.fullmatch(word)
        is_text = is_key or not is_value
        return ArgumentPiece(
            match.end(), json.dumps(word, ensure_ascii=False) if is_text else word, ""
        )

    def _in_string(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        if self._inside == '"':
            return self._in_json_string(text, at)
        quote_at = text.find("<", at)
        if quote_at != at:
            quote_at = len(text) if quote_at < 0 else quote_at
            return (
                ArgumentPiece(quote_at, in_json(text[at:quote_at]), "") if quote_at > at else None
            )
        if text.startswith(self._quote, at):
            self._inside = ""
            return ArgumentPiece(at + len(self._quote), '"', "")
        if text.startswith(self._closing, at):
            return ArgumentPiece(at, "", BROKEN)
        rest = text[at:]
        if any(mark.startswith(rest) for mark in (self._quote, self._closing)):
            return None
        return ArgumentPiece(at + 1, "<", "")

    def _in_json_string(self, text: str, at: int) -> ArgumentPiece | None:
        mark = IN_STRING.search(text, at)
        quote_at = len(text) if mark is None else mark.start()
        if quote_at > at:
            return ArgumentPiece(quote_at, text[at:quote_at], "")
        if at == len(text):
            return None
        if text[at] == '"':
            self._inside = ""
            return ArgumentPiece(at + 1, '"', "")
        return ArgumentPiece(at + 2, text[at : at + 2], "") if at + 1 < len(text) else None


def gemma_parse(quote: str) -> Parse:
    """The parser of one call; `quote`: the mark before and after a string."""

    def parse(text: str) -> list[ToolCall] | None:
        match = _CALL.fullmatch(text)
        if match is None:
            return None
        plain, *rest = match[2].split(quote)
        if len(rest) % 2:
            return None
        pieces = [_KEY.sub(r'\1"\2":', plain)]
        for string, between in zip(rest[::2], rest[1::2], strict=True):
            pieces += [json.dumps(string), _KEY.sub(r'\1"\2":', between)]
        return read_json(f'{{"name": {json.dumps(match[1])}, "arguments": {"".join(pieces)}}}')

    return parse


def write_gemma(calls: Sequence[ToolCall], quote: str) -> list[str]:
    """The text of each call; `quote`: the mark before and after a string."""
    return [f"call:{call.name}{_written(arguments_of(call), quote)}" for call in calls]


def _written(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_written(item, quote) for item in value)}]"
    if isinstance(value, dict):
        members = (f"{key}:{_written(item, quote)}" for key, item in value.items())
        return f"{{{','.join(members)}}}"
    return json.dumps(value)
