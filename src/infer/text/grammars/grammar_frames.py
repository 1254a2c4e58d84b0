"""What crosses between a `GrammarChecker` and its process: four bytes of length and JSON."""

from __future__ import annotations

import json
from typing import IO, Any, NamedTuple


class Verdict(NamedTuple):
    """On one grammar."""

    problem: str
    """why it is refused; "" = it is not"""
    num_bytes: int = 0
    """of memory that it takes when it is compiled"""


def write_frame(pipe: IO[bytes], value: Any) -> None:
    """Raises `OSError` if nobody is at the other end."""
    body = json.dumps(value).encode()
    pipe.write(len(body).to_bytes(4, "little") + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Any:
    """Waits for one; raises `EOFError` if nobody is at the other end any more."""
    head = pipe.read(4)
    body = pipe.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    if not body:
        raise EOFError
    return json.loads(body)
