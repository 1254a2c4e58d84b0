"""Framing of server-sent events.

Exactly `data: ` + one line of ASCII JSON + an empty line, and `event: name` before it only for
typed events: load generators split on empty lines and strip the prefix by its length, and some
clients take U+2028 for the end of a line. One call makes one event; one event is one write.
"""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"


def dump(value: Any) -> str:
    """One line of ASCII JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def data(line: str) -> bytes:
    """An event without a name; `line` is ASCII."""
    return f"data: {line}\n\n".encode("ascii")


def event(name: str, line: str) -> bytes:
    """An event with a name."""
    return f"event: {name}\ndata: {line}\n\n".encode("ascii")
