"""Writing answers of any size as JSON without blocking other threads

The encoder of the standard library holds the interpreter until it is done: 15 MB of
log-probabilities stop every other stream for a tenth of a second, whichever thread encodes them. So
large values are written in parts: members of an object one by one, long lists a few elements at a
time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

LARGE_ANSWER_BYTES = 64 * 1024
"""Approximate size above which an answer is rendered in a thread."""
BYTES_A_LOGPROB = 64
"""Approximate bytes of one token and its log-probability in an answer."""
_MAX_WEIGHT = 4096
"""Maximum weight (numbers, names and short strings) that is encoded at once: half a millisecond."""

_PIECE_CHARS = 128 * 1024
"""Approximate characters that are sent to the socket at once."""

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


class Deferred(NamedTuple):
    """A member that is made only when all before it have been written."""

    make: Callable[[], Any]


def render(value: Any) -> bytes:
    """`value` as JSON in UTF-8. An iterator is written as a list, so that its elements need not
    exist at the same time."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> Iterator[str]:
    before = ""
    if isinstance(value, Deferred):
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
    """Approximate amount to write. All elements of a list are assumed to be like the last one; the
    first may differ, because a prompt's first token has no log-probabilities."""
    if isinstance(value, str):
        return 1 + len(value) // 32
    if isinstance(value, Iterator | Deferred):
        return _MAX_WEIGHT + 1
    if isinstance(value, dict):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value:
        return 1 + len(value) * _weight(value[-1])
    return 1


class LargeResponse(Response):
    """A response whose body is sent in pieces, each after the client has read those before."""

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
    """A response of status 200 with `value` as JSON; all names of members must be strings."""
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
