"""Reading a request body within limits of size and media type, and parsing it as strict JSON

Neither a wrong Content-Length nor a chunked upload gets more into memory than the limit. The parser
is stricter than `json.loads`: it accepts UTF-8 without byte-order mark only, and refuses NaN,
infinities (1e400 is one), duplicate keys, lone surrogates (they cannot be encoded again) and
integers of more than 20 digits. It measures the nesting before the recursive parser runs. msgspec
parses, in half the time of `json`, which parses again whatever is refused, to say what is wrong
with it. All this takes time linear in the body's length.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from infer.errors import RequestError
from infer.server.http.error_responses import HttpError

MAX_BODY_BYTES = 2 * 1024 * 1024
_BLOCK_BYTES = 16 * 1024
"""Size of the blocks in which a body is collected."""
MAX_JSON_DEPTH = 64
"""Maximum nesting of objects and arrays."""
MAX_JSON_CONTAINERS = 50_000
"""Maximum number of objects and arrays in a body; bounds how long the parser blocks the event
loop."""
MAX_JSON_VALUES = 500_000
"""Maximum number of values in a body, for the same reason; the longest contexts have 131,072 token
ids."""
MAX_INTEGER_DIGITS = 20
"""Maximum digits of an integer: 2**64 has 20, and no field takes a longer one."""
MAX_NAME_CHARS = 64
"""Maximum characters of a client's field name or value that an error quotes."""

# Work on a whole body uses methods of bytes where possible: the interpreter runs nothing else
# meanwhile, and regular expressions take ten times as long.
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ZEROS_FOR_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * (MAX_INTEGER_DIGITS + 1)
# The lookbehind fails at once after a digit, so a long run of digits takes linear time.
_LONG_INTEGER = re.compile(rb"(?<![0.eE+])(?<![eE]-)0{%d}0*+(?![.eE])" % len(_MANY_DIGITS))
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object; raises `RequestError` like `parse_json`."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return value


def check_media_type(headers: Headers) -> None:
    """Raise `HttpError` (415) unless the body is declared as uncompressed JSON in UTF-8."""
    media_type, *parameters = headers.get("content-type", "").lower().split(";")
    split = [parameter.strip().partition("=") for parameter in parameters]
    charsets = {value.strip('"') for name, _, value in split if name == "charset"}
    if media_type.strip() != "application/json":
        problem = "the body must be JSON: send the header Content-Type: application/json"
    elif not charsets <= {"utf-8", "utf8"}:
        problem = "the body must be UTF-8, not another charset"
    elif headers.get("content-encoding", "identity").lower() != "identity":
        problem = "a compressed body (Content-Encoding) is not accepted"
    else:
        return
    raise HttpError(415, problem, code="unsupported_media_type")


async def read_body(request: Request, grow_to: Callable[[int], None]) -> bytes:
    """Read a body; raises `HttpError` (413) if it is larger than `MAX_BODY_BYTES`.

    `grow_to` is called with the number of bytes received whenever it grows; see `BodyBudget.body`.
    """
    too_large = HttpError(
        413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 12 or int(declared) > MAX_BODY_BYTES):
        raise too_large
    length, blocks, last = 0, [], bytearray()
    async for piece in request.stream():
        length += len(piece)
        if length > MAX_BODY_BYTES:
            raise too_large
        grow_to(length)
        last += piece
        if len(last) >= _BLOCK_BYTES:  # a growing array would be larger than the body
            blocks.append(bytes(last))
            last.clear()
    return b"".join([*blocks, last])


def parse_json(body: bytes) -> Any:
    """Parse `body` as JSON; raises `RequestError` (400) with the place of what is wrong."""
    if body.startswith(b"\xef\xbb\xbf"):
        _refuse("the body begins with a byte-order mark; send plain UTF-8")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"the body is not valid UTF-8 (at byte {error.start})")
    if not text.strip(" \t\r\n"):
        _refuse("the body is empty; send a JSON object")
    if body.count(b'"') > MAX_JSON_VALUES:
        _refuse(f"the body has more than {MAX_JSON_VALUES} quotation marks")
    # The body without its strings. It is exact up to the first backslash outside of a string, and
    # there the parser fails anyway.
    bare = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    num_containers = _check_nesting(bare)
    if bare.count(b",") >= MAX_JSON_VALUES:
        _refuse(f"the body has more than {MAX_JSON_VALUES} values")
    # One search in all of it; a hook of the parser would take as long as the rest of the parsing.
    zeros = bare.translate(_ZEROS_FOR_DIGITS)
    if _MANY_DIGITS in zeros and _LONG_INTEGER.search(zeros):
        _refuse(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):  # it refuses surrogates, too
        value = msgspec.json.decode(body)
        # Of two members with one key it keeps one.
        if _num_members(value, num_containers) == bare.count(b":"):
            return value
    return _parse_slowly(text)


def _parse_slowly(text: str) -> Any:
    """Parse what has passed the checks before; raises `RequestError` with the place of a fault."""
    try:
        value = json.loads(
            text,
            parse_constant=lambda name: _refuse(f"{name} is not a JSON number"),
            parse_float=_finite_float,
            object_pairs_hook=_unique_keys,
        )
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        _refuse(f"the body is not valid JSON: {error.msg} ({where})")
    except UnicodeEncodeError:
        _refuse("a string holds half of a surrogate pair (\\ud800 to \\udfff)")
    return value


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, code="invalid_json")


def _check_nesting(bare: bytes) -> int:
    """Number of objects and arrays."""
    depth = 0
    brackets = bare.translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_JSON_CONTAINERS:
        _refuse(f"the body has more than {MAX_JSON_CONTAINERS} objects and arrays")
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            _refuse(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")
    return len(brackets) // 2


def _num_members(value: Any, num_containers: int) -> int:
    """Number of members of all objects in a value that consists of so many objects and arrays."""
    containers, members = [value], 0
    for container in containers:
        if isinstance(container, dict):
            members += len(container)
            values: Iterable[Any] = container.values()
        else:
            values = container if isinstance(container, list) else ()
        if len(containers) < num_containers:
            containers += [value for value in values if isinstance(value, dict | list)]
    return members


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        _refuse(f"the number {digits[:MAX_NAME_CHARS]} is too large")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                _refuse(f"an object has the key {json.dumps(key[:MAX_NAME_CHARS])} twice")
            seen.add(key)
    return members
