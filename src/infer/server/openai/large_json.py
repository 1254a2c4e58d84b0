"""JSON of answers of any size, written so that other threads have a turn meanwhile.

The encoder of the standard library holds the interpreter until it is done: 15 MB of
log-probabilities would stop every other stream for a tenth of a second, from any thread. So what is
large is written in parts: members of an object one by one, long lists some elements at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

LARGE_ANSWER_BYTES = 64 * 1024
"""about; what is larger is rendered in a thread"""
BYTES_A_LOGPROB = 64
"""about what one token with its log-probability takes in an answer"""
_MAX_WEIGHT = 4096
"""of what is written at once: numbers, names and short strings; about half a millisecond"""

_PIECE_CHARS = 128 * 1024
"""of what is given to the socket at once"""

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


class Later(NamedTuple):
    """A member that is made when what stands before it has been written."""

    make: Callable[[], Any]


def render(value: Any) -> bytes:
    """`value` as JSON in UTF-8. An iterator is a list whose elements need not all be there at the
    same time."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> Iterator[str]:
    before = ""
    if isinstance(value, Later):
        value = value.make()
    if isinstance(value, Iterator):
        for item in value:
            yield before or "["
            yield from _parts(item)
            before = ","
        yield "]" if before else "[]"
    elif _weight(value) <= _MAX_WEIGHT or not isinstance(value, dict | list | tuple):
        yield _dump(value)
    elif isinstance(value, dict):
        for name, member in value.items():
            yield f"{before or '{'}{_dump(name)}:"
            yield from _parts(member)
            before = ","
        yield "}"
    else:
        size = max(1, _MAX_WEIGHT // _weight(value[-1]))
        for start in range(0, len(value), size):
            yield before or "["
            if size == 1:
                yield from _parts(value[start])
            else:
                yield _dump(value[start : start + size])[1:-1]
            before = ","
        yield "]"


def _weight(value: Any) -> int:
    """About how much there is to write; elements of a list are taken to be like its last one (the
    first token of a prompt has no log-probabilities)."""
    if isinstance(value, str):
        return 1 + len(value) // 32
    if isinstance(value, Iterator | Later):
        return _MAX_WEIGHT + 1
    if isinstance(value, dict):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value:
        return 1 + len(value) * _weight(value[-1])
    return 1


class LargeResponse(Response):
    """A body that is written a piece at a time, each when the client has taken those before."""

    def __init__(self, pieces: list[bytes], media_type: str) -> None:
        self._pieces = pieces
        size = sum(map(len, pieces))
        super().__init__(headers={"content-length": str(size)}, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `Response`."""
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def json_response(value: Any) -> Response:
    """An answer of 200; its members are named by strings."""
    pieces, gathered, size = [], [], 0
    for part in _parts(value):
        gathered.append(part)
        size += len(part)
        if size > _PIECE_CHARS:
            pieces.append("".join(gathered).encode())
            gathered, size = [], 0
    pieces.append("".join(gathered).encode())
    if len(pieces) == 1:
        return Response(pieces[0], media_type="application/json")
    return LargeResponse(pieces, "application/json")
