"""Messages between a `GrammarChecker` and its process: four bytes of length, then JSON."""

from __future__ import annotations

import json
from typing import IO, Any, NamedTuple


class Verdict(NamedTuple):
    """The result of checking one grammar."""

    problem: str
    """Reason why the grammar is refused; "": it is accepted."""
    num_bytes: int = 0
    """Size of the compiled grammar, in bytes."""


def write_frame(pipe: IO[bytes], value: Any) -> None:
    """Write one message; `OSError` if the other process has ended."""
    body = json.dumps(value).encode()
    pipe.write(len(body).to_bytes(4, "little") + body)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> Any:
    """Wait for one message; `EOFError` if the other process has ended."""
    head = pipe.read(4)
    body = pipe.read(int.from_bytes(head, "little")) if len(head) == 4 else b""
    if not body:
        raise EOFError
    return json.loads(body)
