"""`ToolCall` and `Block`: what is found in an answer's text, and who finds it.

The modules `json_calls`, `python_calls`, `gemma_calls` and `named_calls` each know one syntax of
calls; `formats` is the table of whole formats; `calls` applies one of them to an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class ToolCall(NamedTuple):
    """A function and its arguments, the text of a JSON object."""

    name: str
    arguments: str


class Block(NamedTuple):
    """What a reading has decided about the beginning of a text."""

    size: int
    """how many characters the decision is about"""
    calls: Sequence[ToolCall] | None
    """what they spell; None: no calls, so they are content"""


class Reading(Protocol):
    """Reads the text behind an opening mark. One for each block; it may remember where it was."""

    def read(self, text: str, *, end: bool) -> Block | None:
        """The decision; None while more text could change it, which nothing can at the `end`.

        `text` is all there is behind the mark. Each call gets the text of the last one and more.
        A decision depends on the text alone, never on the pieces in which it came.
        """


Parse = Callable[[str], list[ToolCall] | None]
"""The calls that a whole text spells; None if it is something else."""


def made_call(name: Any, arguments: Any) -> ToolCall | None:
    """A call of decoded values; None if they are none. Arguments may be the text of an object."""
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
        return ToolCall(name, text)
    except (TypeError, ValueError, RecursionError):  # infinities are no JSON
        return None


def arguments_of(call: ToolCall) -> Any:
    """The decoded arguments."""
    return json.loads(call.arguments)
