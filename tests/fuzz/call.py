"""`Call`: one HTTP request as a strategy of the fuzzer makes it, and as its runner sends it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """What a client sends to the server."""

    method: str
    path: str
    """with the query, if there is one"""
    body: bytes | Any = b""
    """bytes are sent as they are; anything else is sent as JSON"""
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
