"""`WrittenNumbers`: calls' numbers as the model has written them, in a prompt that repeats them"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]
MAX_DIGITS = 300
"""Length of a number beyond which it is not looked at."""


class _Marked:
    """Reads JSON, in which marks take the place of numbers that have a form of their own."""

    def __init__(self, mark: str, written: list[tuple[str, str]]) -> None:
        self._mark = mark
        self._written = written

    def _of(self, text: str, value: Any) -> Any:
        shown = json.dumps(value)
        if shown == text:
            return value
        self._written.append((text, shown))
        return f"{self._mark}{len(self._written) - 1}{self._mark}"

    def integer(self, text: str) -> Any:
        return self._of(text, int(text)) if len(text) <= MAX_DIGITS else int(text)

    def number(self, text: str) -> Any:
        return self._of(text, float(text)) if len(text) <= MAX_DIGITS else float(text)

    def read(self, text: str) -> Any:
        return json.loads(text, parse_int=self.integer, parse_float=self.number)


def has_own_form(text: str) -> bool:
    """Whether a text of JSON has a number in a form in which it would not be written again."""
    written = list[tuple[str, str]]()
    try:
        _Marked("", written).read(text)
    except (ValueError, RecursionError):
        return False
    return bool(written)


class WrittenNumbers:
    """A number has many forms (`2.50`, `1e5`, `-0`), of which JSON's reader keeps the value only. A
    call that goes back into the prompt in another form is another text than the model's own, and
    the prefix cache does not find it. So such a number is rendered as a mark that stands for it,
    and then put in its place. Whether the template renders a mark as it renders a number is found
    by comparing."""

    def __init__(self, turns: Sequence[Message], mark: str) -> None:
        """`mark`: a character that occurs nowhere in the messages or the template."""
        self._mark = mark
        self._written: list[tuple[str, str]] = []
        """Of each mark, the number as it is written, and as JSON's writer writes it."""
        self.turns = [self._marked(turn) for turn in turns]
        """The messages with marks."""

    def _marked(self, turn: Message) -> Message:
        calls = turn.get("tool_calls")
        if not isinstance(calls, list):
            return turn
        return {**turn, "tool_calls": [self._marked_call(call) for call in calls]}

    def _marked_call(self, call: Any) -> Any:
        function: Any = call.get("function") if isinstance(call, dict) else None
        given = function.get("arguments") if isinstance(function, dict) else None
        if not isinstance(given, str) or not has_own_form(given):
            return call
        value = _Marked(self._mark, self._written).read(given)
        arguments = json.dumps(value, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def restored(self, marked: str, plain: str) -> str:
        """The prompt with the numbers as they are written. `marked`: with marks, `plain`: without;
        this is returned where a mark is not rendered as a number is."""
        escaped = json.dumps(self._mark)[1:-1]
        mark = f"(?:{re.escape(self._mark)}|{re.escape(escaped)})"
        marks = re.compile(f"([\"']?){mark}([0-9]+){mark}\\1")
        shown = marks.sub(lambda match: self._written[int(match[2])][1], marked)
        if shown != plain:
            return plain
        return marks.sub(lambda match: self._written[int(match[2])][0], marked)


def calls_with_own_forms(turns: Sequence[Message]) -> bool:
    """Whether a call in these messages has such a number."""
    return any(
        isinstance(given := function.get("arguments"), str) and has_own_form(given)
        for turn in turns
        if isinstance(calls := turn.get("tool_calls"), list)
        for call in calls
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict)
    )
