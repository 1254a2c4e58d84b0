"""Reads a request body within the limits of size, time and media type, and parses it strictly.

Neither a lie in Content-Length nor a chunked upload gets more into memory than the limit. Stricter
than `json.loads`: UTF-8 only and no byte-order mark, no NaN, no infinities (1e400 is one), no keys
twice, no lone surrogates (they cannot be encoded again), no integers of thousands of digits, and
the nesting is measured before the recursive parser sees it; all in time linear in the body.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request

from infer.errors import RequestError
from infer.server.http.error_responses import HttpError

MAX_BODY_BYTES = 2 * 1024 * 1024
_BLOCK_BYTES = 16 * 1024
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 50_000
"""objects and arrays in one body: bounds the time the parser may keep the event loop"""
MAX_JSON_VALUES = 500_000
"""bounds it too; the longest contexts there are have 131,072 token ids"""
MAX_INTEGER_DIGITS = 20
"""2**64 has 20; longer integers are not numbers that any field could mean"""
MAX_NAME_CHARS = 64
"""of a client's field name or value quoted back in an error"""

# What is done with a whole body is done by methods of bytes wherever they can: the interpreter runs
# nothing else meanwhile, and expressions take ten times as long.
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ZEROS_FOR_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_MANY_DIGITS = b"0" * (MAX_INTEGER_DIGITS + 1)
# Behind a digit it fails at once, so that a long run of them costs no more than its length.
_LONG_INTEGER = re.compile(rb"(?<![0.eE+])(?<![eE]-)0{%d}0*+(?![.eE])" % len(_MANY_DIGITS))
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, Any]:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return value


def check_media_type(headers: Headers) -> None:
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
        if len(last) >= _BLOCK_BYTES:  # one array for all would be larger than the body
            blocks.append(bytes(last))
            last.clear()
    return b"".join([*blocks, last])


def parse_json(body: bytes) -> Any:
    """The value that `body` is the JSON text of; `RequestError` (400) where it is none."""
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
    # Without its strings. Up to a backslash outside of them, where the parser stops, this is exact.
    bare = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    _check_nesting(bare)
    if bare.count(b",") >= MAX_JSON_VALUES:
        _refuse(f"the body has more than {MAX_JSON_VALUES} values")
    # Once for all: as a hook of the parser it would take as long as the rest of it.
    zeros = bare.translate(_ZEROS_FOR_DIGITS)
    if _MANY_DIGITS in zeros and _LONG_INTEGER.search(zeros):
        _refuse(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
    try:
        value = json.loads(
            text,
            parse_constant=lambda name: _refuse(f"{name} is not a JSON number"),
            parse_float=_finite_float,
            object_pairs_hook=_unique_keys,
        )
        if b"\\u" in body and _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        _refuse(f"the body is not valid JSON: {error.msg} ({place})")
    except UnicodeEncodeError:
        _refuse("a string holds half of a surrogate pair (\\ud800 to \\udfff)")
    return value


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, code="invalid_json")


def _check_nesting(bare: bytes) -> None:
    depth = 0
    brackets = bare.translate(None, _NOT_BRACKETS)
    if len(brackets) > 2 * MAX_JSON_CONTAINERS:
        _refuse(f"the body has more than {MAX_JSON_CONTAINERS} objects and arrays")
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_JSON_DEPTH:
            _refuse(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")


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
                _refuse(f"the key {json.dumps(key[:MAX_NAME_CHARS])} is there twice in one object")
            seen.add(key)
    return members
