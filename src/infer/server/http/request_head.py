"""`RequestHead`: the request line and headers of a request, read with the standard library alone"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from infer.server.http.http_errors import HttpError
from infer.server.http.paths import canonical_path

HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""Text of a client that may be repeated in a header of the answer."""
_END = re.compile(rb"\r?\n\r?\n")
_END_BYTES = 4
"""The most bytes of `_END`."""
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LINE = re.compile(rb"(" + _NAME.pattern + rb") ([\x21-\x7e]+) HTTP/1\.([01])")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class RequestHead(NamedTuple):
    """For answers that are given before the server has been imported. What is read must be
    complete; `end_of_head` says where it ends."""

    method: str
    path: str
    """Decoded and with single slashes, without the query."""
    headers: Mapping[str, str]
    """By their names in lower case; of a name that comes twice the first."""
    num_ids: int
    """How many headers `x-request-id` there are."""

    @property
    def client_id(self) -> str | None:
        """The client's `x-request-id`, if it is harmless and the only one."""
        offered = self.headers.get("x-request-id", "")
        return offered if self.num_ids == 1 and HARMLESS.fullmatch(offered) else None

    @property
    def has_body(self) -> bool:
        """Whether a body may follow."""
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"


def not_http() -> HttpError:
    """The error for what is no HTTP/1.1."""
    return HttpError(400, "this is not valid HTTP/1.1", code="invalid_http")


def end_of_head(data: bytes | bytearray, num_seen: int = 0) -> int | None:
    """Where the head ends that `data` begins with; None if it is incomplete. Raises `HttpError` for
    what cannot become one. `num_seen`: bytes that have been looked at before."""
    start = len(data) - len(data.lstrip(b"\r\n"))
    if start < len(data) and data[start] < 0x21:
        raise not_http()
    match = _END.search(data, max(start, num_seen - _END_BYTES))
    return None if match is None else match.end()


def read_head(data: bytes) -> RequestHead:
    """The head in `data`, which is complete. Raises `HttpError` for what is no HTTP/1.1."""
    first, *rest = data.strip(b"\r\n").replace(b"\r\n", b"\n").split(b"\n")
    line = _LINE.fullmatch(first)
    if line is None:
        raise not_http()
    headers: dict[str, str] = {}
    num_ids = 0
    for header in rest:
        name, colon, value = header.partition(b":")
        if not colon or not _NAME.fullmatch(name) or _CONTROL.search(value):
            raise not_http()
        key = name.decode("ascii").lower()
        num_ids += key == "x-request-id"
        headers.setdefault(key, value.strip(b" \t").decode("latin-1"))
    if line[3] == b"1" and "host" not in headers:
        raise not_http()
    path = unquote(line[2].partition(b"?")[0].decode("ascii"))
    return RequestHead(line[1].decode("ascii"), canonical_path(path), headers, num_ids)
