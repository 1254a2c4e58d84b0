"""`ToolCall`: a call in an answer; `Block` and `Reading`: the protocol of parsers of calls.

The modules `json_calls`, `python_calls`, `gemma_calls` and `named_calls` each know one syntax of
calls, and `streamed_calls` returns their arguments while they are written. `formats` is the table
of complete formats. `text.answer_parser` applies one of them to an
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_SURROGATE = re.compile("[\ud800-\udfff]")


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    """Name of the function."""
    arguments: str
    """Arguments as the text of a JSON object."""


class Parts(NamedTuple):
    """The parts of an answer that a piece of text has added."""

    reasoning: str = ""
    """Further text of the reasoning."""
    content: str = ""
    """Further text of the content."""
    calls: tuple[ToolCall, ...] = ()
    """Calls that have begun, with their arguments so far."""
    more: str = ""
    """Further arguments of the call that was the last one before these."""


def taken(
    reasoning: list[str], content: list[str], calls: list[ToolCall], more: list[str]
) -> Parts:
    """The parts that have gathered in these lists, which are empty afterwards."""
    parts = Parts("".join(reasoning), "".join(content), tuple(calls), "".join(more))
    for given in (reasoning, content, calls, more):
        given.clear()
    return parts


class Block(NamedTuple):
    """A decision about the beginning of a text."""

    size: int
    """Number of characters to which the decision applies."""
    calls: Sequence[ToolCall] | None
    """Calls that begin in these characters; None: they are content."""
    more: str = ""
    """Further arguments of the last call before these."""
    is_open: bool = False
    """Whether the calls go on behind these characters, from where the next text begins."""


class Reading(Protocol):
    """Parses the text after an opening mark. Each block has its own, which may keep its place."""

    def read(self, text: str, *, end: bool) -> Block | None:
        """The decision about `text`; None while further text could change it.

        `text` is the text so far after the mark or the last open `Block`; it begins with the text
        that was not decided about.
        With `end` there is always a decision. It depends on the text alone and not on the pieces in
        which the text came.
        """


Parse = Callable[[str], list[ToolCall] | None]
"""Function from a whole text to its calls; None: the text is not calls."""


def made_call(name: Any, arguments: Any) -> ToolCall | None:
    """A call made of decoded values; None if they are not valid.

    `arguments`: an object or its JSON text.
    """
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, Mapping):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        if _SURROGATE.search(text):  # no text: it stays the escape that it was
            text = json.dumps(arguments, allow_nan=False)
        return ToolCall(name, text)
    except (TypeError, ValueError, RecursionError):  # for example, JSON has no infinities
        return None


def arguments_of(call: ToolCall) -> Any:
    """The arguments of a call as Python objects."""
    return json.loads(call.arguments)
