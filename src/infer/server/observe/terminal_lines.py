"""`TerminalLines`: lines of the log in a terminal, and one for each request that people wait for"""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
from typing import Any, TextIO

from infer.types.ends import NORMAL_OUTCOMES

CLEAR_LINE = "\r\x1b[K"
"""Moves to the left edge and clears the line."""
WIDE = 100
"""Columns of a terminal in which a line has all that is known."""
_NO_COLUMNS = 80
"""Columns of a terminal that does not say how many it has."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether people read a stream, in a terminal that can clear a line."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # it is closed
        return False


def columns_of(stream: TextIO) -> int:
    """The width of a terminal as it is now."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _NO_COLUMNS
    except (OSError, ValueError):
        return _NO_COLUMNS


def is_for_people(record: logging.LogRecord) -> bool:
    """Whether a line is for a terminal: of requests those that generate or that are refused, and
    not the files of a page, nor what it asks for every second."""
    fields: dict[str, Any] | None = getattr(record, "fields", None)
    if record.name != "infer.access" or fields is None:
        return True
    return ("prompt_tokens" in fields and "path" in fields) or fields.get("status", 0) >= 400


def printable(text: str) -> str:
    """The text without what moves the cursor or changes the direction of writing."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


class TerminalLines(logging.Formatter):
    """A line begins at the left edge and clears what is there, because the last line of the screen
    may be a spinner. What clients send is shown without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        width = columns_of(sys.stderr)
        if record.name != "infer.access":
            lines = super().format(record).split("\n")
            return CLEAR_LINE + "\n".join(row for line in lines for row in _rows(line, width))
        fields: dict[str, Any] = getattr(record, "fields", {})
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{CLEAR_LINE}{when} {request_line(fields, width)}"


def _rows(line: str, width: int) -> list[str]:
    """A line cut between its words, where it is longer than the terminal is wide."""
    if len(line) < width:
        return [line]
    return textwrap.wrap(
        line,
        width - 1,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def request_line(fields: dict[str, Any], width: int) -> str:
    """What a line says of a request; `fields`: as `log_request` has them."""
    is_wide = width >= WIDE
    parts = [printable(str(fields.get("path", ""))), str(fields.get("status", ""))]
    if is_wide:
        parts.insert(0, printable(str(fields.get("method", ""))))
    outcome = fields.get("outcome")
    if outcome and outcome not in NORMAL_OUTCOMES:
        parts.append(printable(str(outcome)))
    details = []
    if is_wide and fields.get("model"):
        details.append(printable(str(fields["model"])))
    if "prompt_tokens" in fields:
        tokens = f"{fields['prompt_tokens']:,}+{fields.get('completion_tokens') or 0:,} tokens"
        if is_wide and fields.get("cached_tokens"):
            tokens += f" ({fields['cached_tokens']:,} cached)"
        details.append(tokens)
    first_ms = fields.get("first_token_ms")
    if is_wide and first_ms is not None:
        details.append(f"first after {_seconds(first_ms)}")
    details.append(_seconds(fields.get("ms", 0.0)))
    return " · ".join([" ".join(parts), *details])


def _seconds(ms: float) -> str:
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms"
