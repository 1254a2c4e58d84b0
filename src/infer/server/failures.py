"""The one place where an exception becomes an HTTP error: status, OpenAI's body, headers.

Our own exceptions are shown as they are (`infer.errors` promises that they hold nothing of the
server's inside); any other exception becomes the same fixed sentence, because its text may carry
paths, addresses or somebody's prompt. Called by the app's exception handlers, by `edge` for what
nobody expected, and by streams for errors after the first byte.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from infer.errors import EngineError, OverloadedError, RequestError
from infer.server.limits import DEAD_RETRY_AFTER_S

_UNEXPECTED = "the server failed to process this request"


class ClientGone(Exception):
    """The client has left (or reads nothing any more): there is nobody to answer."""


class NotFoundError(RequestError):
    status = 404


class SlowUploadError(RequestError):
    status = 408


class BodyTooLargeError(RequestError):
    status = 413


class MediaTypeError(RequestError):
    status = 415


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as the wire shows it."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> str:
        """OpenAI's error body: one line of ASCII JSON; `code` is a string or null."""
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": fields}, separators=(",", ":"))

    def response(self) -> Response:
        return Response(
            self.body(),
            status_code=self.status,
            headers=dict(self.headers),
            media_type="application/json",
        )


def describe(error: BaseException) -> Failure:
    """What the client is told about `error`."""
    if isinstance(error, OverloadedError):
        retry = (("retry-after", str(error.retry_after_s)),)
        return Failure(error.status, error.message, error.type, error.param, error.code, retry)
    if isinstance(error, RequestError):
        return Failure(error.status, error.message, error.type, error.param, error.code)
    if isinstance(error, EngineError):
        code = "engine_unavailable" if error.status == 503 else "engine_error"
        wait = (("retry-after", str(DEAD_RETRY_AFTER_S)),) if error.status == 503 else ()
        return Failure(error.status, str(error) or _UNEXPECTED, error.type, None, code, wait)
    if isinstance(error, HTTPException):  # from the router: no such route, not with this method
        phrase = HTTPStatus(error.status_code).phrase
        message = {
            404: "there is no such route; see / for what there is",
            405: "this route is there, but not with this method; see the Allow header",
        }.get(error.status_code, phrase.lower())
        code = phrase.lower().replace(" ", "_")
        headers = tuple((error.headers or {}).items())
        return Failure(error.status_code, message, "invalid_request_error", None, code, headers)
    return Failure(500, _UNEXPECTED, "server_error", None, "internal_error")


async def respond(_: Request, error: Exception) -> Response:
    """The app's handler of every exception that is expected."""
    return describe(error).response()
