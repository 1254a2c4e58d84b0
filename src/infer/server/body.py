"""Reads a request body within the limits of size, time and media type.

The size is checked against Content-Length first and then while reading, so that neither a lie nor
a chunked upload gets more into memory than the limit. Called by `routes`; what the bytes mean is
`strict_json`'s and `wire`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from infer.errors import RequestError
from infer.server import strict_json
from infer.server.failures import BodyTooLargeError, ClientGone, MediaTypeError, SlowUploadError
from infer.server.limits import BODY_TIMEOUT_S, LONG_BODY_BYTES, MAX_BODY_BYTES

T = TypeVar("T")


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object that the body is."""
    _check_media_type(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await _read(request)
    except TimeoutError:
        raise SlowUploadError(
            f"the body was not complete after {BODY_TIMEOUT_S:g} s", code="request_timeout"
        ) from None
    except ClientDisconnect:
        raise ClientGone from None
    value = strict_json.parse(body)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_type")
    return value


async def computed(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)`; in a thread if the body is so long that others would notice."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) <= LONG_BODY_BYTES:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _check_media_type(request: Request) -> None:
    media_type, *parameters = request.headers.get("content-type", "").lower().split(";")
    if media_type.strip() != "application/json":
        raise MediaTypeError(
            "the body must be JSON: send the header Content-Type: application/json",
            code="unsupported_media_type",
        )
    for parameter in parameters:
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise MediaTypeError(
                "the body must be UTF-8, not another charset", code="unsupported_media_type"
            )
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise MediaTypeError(
            "a compressed body (Content-Encoding) is not accepted", code="unsupported_media_type"
        )


async def _read(request: Request) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 12 or int(declared) > MAX_BODY_BYTES):
        raise _too_large()
    body = bytearray()
    async for piece in request.stream():
        if len(body) + len(piece) > MAX_BODY_BYTES:
            raise _too_large()
        body += piece
    return bytes(body)


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large"
    )
