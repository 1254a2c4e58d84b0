"""What the fuzzer's strategies make and its runner sends: `Call`, `CallSequence`, `RawRequest`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODEL = "hash-model"
"""Name of the model that calls ask for; the runner's servers have one of this name."""


@dataclass(frozen=True)
class Call:
    """What a client sends to the server."""

    method: str
    path: str
    """With the query, if there is one."""
    body: bytes | Any = b""
    """Bytes are sent as they are; anything else is sent as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body's bytes."""
        if isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode("utf-8", "replace")

    @property
    def sent_headers(self) -> dict[str, str]:
        """JSON has its content type, unless the call says another one."""
        named = {name.lower() for name in self.headers}
        if isinstance(self.body, bytes) or "content-type" in named:
            return dict(self.headers)
        return {"Content-Type": "application/json", **self.headers}


@dataclass(frozen=True)
class CallSequence:
    """Calls that a client sends one after the other. `id_of(0)` in a path or a body stands for the
    first id of a session that an answer brought, `id_of(1)` for the second."""

    calls: tuple[Call, ...]


def id_of(number: int) -> str:
    """Placeholder of a session's id in the calls of a sequence."""
    return f"~id-{number}~"


@dataclass(frozen=True)
class RawRequest:
    """Bytes for a connection of their own, in pieces; the client then closes its side."""

    pieces: tuple[bytes, ...]
