"""`ArgumentText`: a call's arguments as JSON text, while the model writes them.

Each reader takes the text behind a call's head in pieces and returns what is certain of its JSON.
The pieces together are a function of the text alone. `ObjectText` leaves JSON as it is. Formats
with another syntax of arguments have readers of their own (`python_calls`, `gemma_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

OPEN, WHOLE, BROKEN = "open", "whole", "broken"


class ArgumentPiece(NamedTuple):
    """What a reader has made of the beginning of a text."""

    size: int
    """Number of characters that it has read; the next text begins behind them."""
    json: str
    """Further JSON of the arguments."""
    state: str = OPEN
    """`OPEN`: more may follow; `WHOLE`: the arguments are complete; `BROKEN`: what comes next is no
    part of arguments, which stay incomplete."""


class ArgumentText(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str, *, end: bool) -> ArgumentPiece:
        """What can be read of `text`, which begins behind what has been read. `end`: no more text
        follows; then all of an incomplete text is read."""


def read_tokens(
    step: Callable[[str, int, bool], ArgumentPiece | None], text: str, end: bool, begun: str = ""
) -> ArgumentPiece:
    """What a reader that goes from token to token can read of `text`, behind the JSON `begun`.

    `step(text, at, end)` reads one token from `at`; its `size` is where the token ends, its `state`
    is "" within arguments. None: the token is not complete.
    """
    pieces, at = [begun], 0
    while True:
        piece = step(text, at, end)
        if piece is None:
            return ArgumentPiece(len(text) if end else at, "".join(pieces))
        at = piece.size
        pieces.append(piece.json)
        if piece.state:
            return ArgumentPiece(at, "".join(pieces), piece.state)


_OUTSIDE = re.compile(r"[^\s:,0-9A-Za-z+.\-]")
IN_STRING = re.compile(r'["\\]')
"""Pattern of what a string in JSON does not have as it is."""


class ObjectText:
    """Reads a JSON object, as it is, up to its closing bracket.

    A character that JSON does not have outside of strings ends it too. Other faults are left to
    whoever parses the arguments: what a model has written must not get lost.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False

    def read(self, text: str, *, end: bool) -> ArgumentPiece:
        """See `ArgumentText`."""
        at = 0
        while True:
            match = (IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if match is None:
                return ArgumentPiece(len(text), text)
            char, at = match[0], match.end()
            if self._in_string:
                if char == '"':
                    self._in_string = False
                elif at < len(text) or end:
                    at += 1
                else:  # the escaped character has not come yet
                    return ArgumentPiece(at - 1, text[: at - 1])
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return ArgumentPiece(at, text[:at], WHOLE)
            else:
                return ArgumentPiece(match.start(), text[: match.start()], BROKEN)


_SURROGATE = re.compile("[\\ud800-\\udfff]")


def in_json(text: str) -> str:
    """A part of a string as it is written inside the quotes of JSON."""
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)[1:-1]
