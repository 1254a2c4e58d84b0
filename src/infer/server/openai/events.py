"""How a server-sent event is written."""

from __future__ import annotations

import json

dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""One line of ASCII JSON."""


NOTHING_YET = b": nothing yet\n\n"
"""A comment, for streams whose clients know no event that says so."""


def event(line: str, name: str | None = None) -> bytes:
    """Exactly `data: `, a line of ASCII and an empty line; before it a typed event's name.

    Load generators split on empty lines and cut the prefix off by its length, and some clients
    take U+2028 for the end of a line. One event is one write.
    """
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {line}\n\n".encode("ascii")
