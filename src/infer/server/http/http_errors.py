"""`answer_to`: what an exception is to a client: a status, headers, and OpenAI's error body

Our own exceptions are shown as they are (`infer.errors` guarantees that they reveal nothing about
the server's internals). Any other becomes one fixed sentence, because its text may contain paths,
addresses or a prompt. The standard library only: the server's port answers before the server is
imported.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from infer.errors import EngineError, OverloadedError, RequestError

DEAD_RETRY_AFTER_S = 5
"""Seconds in `Retry-After` of a 503 whose exception has no time of its own."""
MAX_HEADER_BYTES = 16 * 1024
"""Maximum bytes of request line and headers together."""
_UNEXPECTED = "the server failed to process this request"


class HttpError(RequestError):
    """A refusal with an HTTP status that `infer.errors` has no exception for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        type: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """`type` is that of OpenAI's error body, by default `invalid_request_error`.
        `retry_after_s` becomes the header `Retry-After`, in seconds. For the others see
        `RequestError`."""
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = type or self.type
        self.retry_after_s = retry_after_s


def headers_too_large() -> HttpError:
    """The error for request line and headers over `MAX_HEADER_BYTES`, complete or not."""
    message = f"the request line and headers have more than {MAX_HEADER_BYTES} bytes"
    return HttpError(431, message, code="headers_too_large")


class ErrorAnswer(NamedTuple):
    """An answer with an error."""

    status: int
    headers: dict[str, str]
    """Besides those that every answer has."""
    body: bytes
    """JSON, one line of ASCII."""


def error_body(
    message: str, kind: str, param: str | None, code: str | None, more: dict[str, Any] | None = None
) -> bytes:
    """OpenAI's error body. `more`: fields beside `error`."""
    fields = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": fields, **(more or {})}, separators=(",", ":")).encode("ascii")


def answer_to(
    error: BaseException,
    overload_status: int = OverloadedError.status,
    more: dict[str, Any] | None = None,
) -> ErrorAnswer:
    """The answer to a request that ends with an exception. `overload_status` is the status of an
    `OverloadedError`. `more`: see `error_body`."""
    status, kind, message = 500, "server_error", _UNEXPECTED
    param: str | None = None
    code: str | None = "internal_error"
    headers: dict[str, str] = {}
    if isinstance(error, RequestError | EngineError):
        status, kind, message = error.status, error.type, str(error) or _UNEXPECTED
        if isinstance(error, RequestError):
            param, code = error.param, error.code
            if isinstance(error, OverloadedError):
                status = overload_status
        else:
            code = "engine_unavailable" if status == 503 else "engine_error"
        if status == 408:  # the rest of this request could be mistaken for the next one
            headers = {"connection": "close"}
        retry_after_s = getattr(error, "retry_after_s", None)
        if retry_after_s is not None or status == 503:
            headers["retry-after"] = str(retry_after_s or DEAD_RETRY_AFTER_S)
    return ErrorAnswer(status, headers, error_body(message, kind, param, code, more))
