"""Bytes of a request body → Python values, or a `RequestError` that says what is wrong with them.

Stricter than `json.loads`: UTF-8 only and without a byte-order mark, no NaN and no infinities
(1e400 is one), no keys twice, no lone surrogates (they cannot be encoded again), no integers of
thousands of digits, and the nesting is measured before the recursive parser sees it. All of it in
time linear in the body. Called by `body`; knows nothing of fields.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from infer.errors import RequestError
from infer.server.limits import (
    MAX_INTEGER_DIGITS,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_NAME_CHARS,
)

# An unterminated string counts up to the end, so that no input makes the search start over.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?+)*+(?:"|\Z)', re.DOTALL)
_NOT_BRACKET = re.compile(r"[^\[\]{}]++")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, code="invalid_json")


def parse(body: bytes) -> Any:
    """The value that `body` is the JSON text of; `RequestError` (400) where it is none."""
    if body.startswith(b"\xef\xbb\xbf"):
        _refuse("the body begins with a byte-order mark; send plain UTF-8")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"the body is not valid UTF-8 (at byte {error.start})")
    if not text.strip(" \t\r\n"):
        _refuse("the body is empty; send a JSON object")
    _check_nesting(text)
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            parse_int=_short_int,
            object_pairs_hook=_unique_keys,
        )
    except json.JSONDecodeError as error:
        _refuse(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        )
    if _SURROGATE_ESCAPE.search(text):
        _check_encodable(value)
    return value


def _check_nesting(text: str) -> None:
    depth = 0
    brackets = _NOT_BRACKET.sub("", _STRING.sub("", text))
    if len(brackets) > 2 * MAX_JSON_CONTAINERS:
        _refuse(f"the body has more than {MAX_JSON_CONTAINERS} objects and arrays")
    for bracket in brackets:
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_JSON_DEPTH:
            _refuse(f"the body is nested deeper than {MAX_JSON_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    _refuse(f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        _refuse(f"the number {digits[:MAX_NAME_CHARS]} is too large")
    return value


def _short_int(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS + digits.startswith("-"):
        _refuse(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
    return int(digits)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                _refuse(f"the key {_printable(key)} is there twice in one object")
            seen.add(key)
    return members


def _printable(key: str) -> str:
    return json.dumps(key[:MAX_NAME_CHARS])


def _check_encodable(value: Any) -> None:
    """Refuses half surrogate pairs; the depth of the recursion is bounded by `_check_nesting`."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            _refuse("a string holds half of a surrogate pair (\\ud800 to \\udfff)")
    elif isinstance(value, list):
        for item in value:
            _check_encodable(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_encodable(key)
            _check_encodable(item)
