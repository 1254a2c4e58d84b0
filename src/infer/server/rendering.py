"""JSON of answers of any size, written so that other threads have a turn meanwhile.

The encoder of the standard library holds the interpreter until it is done: 15 MB of
log-probabilities would stop every other stream for a tenth of a second, from any thread. So what is
large is written in parts: members of an object one by one, long lists some elements at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

LARGE_ANSWER_BYTES = 64 * 1024
"""about; what is larger is rendered in a thread"""
BYTES_A_LOGPROB = 64
"""about what one token with its log-probability takes in an answer"""
_MAX_WEIGHT = 4096
"""of what is written at once: numbers, names and short strings; about half a millisecond"""

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


def render(value: Any) -> bytes:
    """`value` as JSON in UTF-8."""
    return "".join(_parts(value)).encode()


def _parts(value: Any) -> Iterator[str]:
    before = ""
    if _weight(value) <= _MAX_WEIGHT or not isinstance(value, dict | list | tuple):
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
    if isinstance(value, dict):
        return 1 + sum(map(_weight, value.values()))
    if isinstance(value, list | tuple) and value:
        return 1 + len(value) * _weight(value[-1])
    return 1


def json_response(value: Any) -> Response:
    """An answer of 200; its members are named by strings."""
    return Response(render(value), media_type="application/json")
