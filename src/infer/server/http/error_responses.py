"""HTTP errors from exceptions; `RequestBoundary`, the outermost layer, which catches all of them

Our own exceptions are shown as they are (`infer.errors` guarantees that they reveal nothing about
the server's internals). Any other becomes one fixed sentence, because its text may contain paths,
addresses or a prompt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.errors import InferError, OverloadedError
from infer.server.http.anthropic_errors import is_anthropic
from infer.server.http.connections import note_refusal
from infer.server.http.context import RequestContext
from infer.server.http.error_forms import reformed
from infer.server.http.http_errors import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from infer.server.http.http_errors import HttpError as HttpError
from infer.server.http.http_errors import answer_to, error_body
from infer.server.http.http_errors import headers_too_large as headers_too_large
from infer.server.http.paths import nearest_path, path_of

log = logging.getLogger("infer.server")

IGNORED = "infer.ignored"
"""Key, in an ASGI scope, of the list of names of the request's fields that were ignored; None in
its place where unknown fields are refused."""
_ABSENT = {
    "/embeddings": "embeddings",
    "/images/generations": "images",
    "/audio/speech": "speech",
    "/audio/transcriptions": "transcriptions",
    "/moderations": "moderations",
    "/rerank": "reranking",
}
"""Ends of paths that clients try and that do not exist here, with their names in the error."""
_ROUTER = {
    404: "there is no such route: this server completes texts and chats, at /v1/completions and"
    " /v1/chat/completions; see / for all routes",
    405: "this route does not allow this method; see the Allow header",
}
_IGNORED_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Name of an ignored field that may stand in a header; any other may be an attempt at injection."""
_MAX_IGNORED_BYTES = 1024
"""Maximum size of the header that lists ignored fields; proxies allow 4 KiB for all headers."""
Handler = Callable[[Request, Exception], Awaitable[Response]]


class ClientGone(Exception):
    """The client has closed the connection or reads nothing, so there is no one to answer."""


def too_many(message: str, wait_s: float) -> HttpError:
    """The 429 for a key's limit, with the seconds after which to try again."""
    return HttpError(
        429,
        message,
        code="rate_limit_exceeded",
        type="rate_limit_error",
        retry_after_s=math.ceil(wait_s),
    )


def _check_head(scope: Scope) -> None:
    """Refuse headers that the parser accepts: it limits the size of incomplete headers only, and it
    allows Content-Length beside Transfer-Encoding, which proxies may read differently."""
    sizes = [len(name) + len(value) + 4 for name, value in scope["headers"]]
    target = len(scope.get("raw_path", b"")) + len(scope.get("query_string", b""))
    if len(scope["method"]) + target + 14 + sum(sizes) > MAX_HEADER_BYTES:
        note_refusal(scope, "headers_too_large")
        raise headers_too_large()
    names = {name for name, _ in scope["headers"]}
    message = ""
    if {b"content-length", b"transfer-encoding"} <= names:
        message = "send Content-Length or Transfer-Encoding, not both"
    elif b"transfer-encoding" in names and scope["http_version"] < "1.1":
        message = "HTTP/1.0 has no Transfer-Encoding: send Content-Length, or HTTP/1.1"
    if message:
        note_refusal(scope, "invalid_http")
        raise HttpError(400, message, code="invalid_http")


def describe(error: BaseException, overload_status: int = OverloadedError.status) -> Response:
    """The response for an exception. `overload_status` is the status of an `OverloadedError`."""
    if isinstance(error, HTTPException):  # from the router, for an unknown route or method
        phrase = HTTPStatus(error.status_code).phrase.lower()
        message, code = _ROUTER.get(error.status_code, phrase), phrase.replace(" ", "_")
        body = error_body(message, "invalid_request_error", None, code)
        return Response(body, error.status_code, error.headers, "application/json")
    answer = answer_to(error, overload_status)
    return Response(answer.body, answer.status, answer.headers, "application/json")


def error_handlers(overload_status: int) -> dict[type[Exception], Handler]:
    """An app's handlers for expected exceptions. `overload_status`: see `describe`."""
    handler = partial(_respond, overload_status)
    return {HTTPException: handler, InferError: handler}


async def _respond(overload_status: int, http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = _no_route(http)
    response = describe(error, overload_status)
    if response.status_code == 405:  # the router knows only the first route of this path
        here = [
            r for r in http.app.routes if isinstance(r, Route) and r.matches(http.scope)[0].value
        ]
        response.headers["allow"] = ", ".join(sorted({m for r in here for m in r.methods or ()}))
    return response


def _no_route(http: Request) -> HttpError:
    """The error for a path that is none, with the one that was meant if it can be told."""
    path = http.scope["path"]
    for end, name in _ABSENT.items():
        if path.endswith(end):
            message = f"this server has no {name}: it completes texts and chats"
            return HttpError(404, f"{message}; see / for its routes", code="not_found")
    message, meant = _ROUTER[404], nearest_path(path, http.app.routes)
    if meant is not None:
        message = f"there is no route {path!r}; did you mean {meant!r}?"
        if meant.startswith("/v1/"):
            message += " The base URL of OpenAI's clients ends in /v1 here; see / for all routes"
    return HttpError(404, message, code="not_found")


async def pass_on(_: Request, error: Exception) -> Response:
    """The app's handler for all other exceptions, instead of Starlette's, which would send an error
    in its own format. It raises, and `RequestBoundary` answers."""
    raise error


def _ignored_params(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The header that lists ignored fields; names with other characters are shown as one `?`."""
    names = scope[IGNORED] or ()
    shown = dict.fromkeys(name if _IGNORED_NAME.fullmatch(name) else "?" for name in names)
    text = ", ".join(shown)[: _MAX_IGNORED_BYTES + 1]
    if len(text) > _MAX_IGNORED_BYTES:
        text = text.rpartition(", ")[0]
    return [(b"x-ignored-params", text.encode("ascii"))] if text else []


class RequestBoundary:
    """The outermost layer: puts an id on every response and answers unexpected exceptions.

    The id on a response is the client's `x-request-id` if that consists of harmless characters,
    else the context's own. The context is cleaned up here, however the request ends. This is plain
    ASGI on purpose: Starlette's middleware class would put a queue between handler and socket and
    hide `http.disconnect`. A client that reads nothing for `write_stall_s` seconds counts as gone.
    """

    def __init__(
        self,
        app: ASGIApp,
        write_stall_s: float,
        on_end: Sequence[Callable[[RequestContext], None]] = (),
        model: str = "",
        id_prefix: str = "",
        ignores_unknown: bool = True,
    ) -> None:
        """`on_end` is called with each request that has ended. `model`: name of the only model.
        `id_prefix`: hexadecimal digits with which the requests' ids begin. `ignores_unknown`:
        unknown fields of a body are named in a header of the answer, not refused."""
        self._app = app
        self._write_stall_s = write_stall_s
        self._on_end = on_end
        self._model = model
        self._id_prefix = id_prefix
        self._ignores_unknown = ignores_unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = path_of(scope["path"], Headers(scope=scope).get("host", ""))
        scope[IGNORED] = [] if self._ignores_unknown else None
        context = RequestContext.of(scope, self._id_prefix)
        context.model = self._model

        held: list[Message] = []

        async def send_in_form(message: Message) -> None:
            """Hold the start of an error back until its body is there, if both change."""
            is_error = message["type"] == "http.response.start" and message["status"] >= 400
            if is_error and is_anthropic(scope["path"], Headers(scope=scope)):
                held.append(message)
                return
            messages = [message]
            if held:
                messages = [*reformed(held.pop(), message, context.shown_id)]
            for held_message in messages:
                await send_with_id(held_message)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    *context.standard_headers,
                    *_ignored_params(scope),
                    *((name.encode(), value.encode()) for name, value in context.headers),
                ]
            try:
                async with asyncio.timeout(self._write_stall_s):
                    await send(message)
            except (TimeoutError, OSError):
                raise ClientGone from None

        try:
            with context.cleanup:
                _check_head(scope)
                await self._app(scope, receive, send_in_form)
        except HttpError as error:  # bad headers: the start of the next request is not known
            response = describe(error)
            response.headers["connection"] = "close"
            await response(scope, receive, send_in_form)
        except ClientGone:
            log.debug("request %s: the client has left", context.id)
        except Exception as error:
            log.exception("request %s failed", context.id)
            if not context.status:
                await describe(error)(scope, receive, send_in_form)
        finally:
            context.on_revoked = None  # it holds the trace, and the trace holds the context
            for listener in self._on_end:
                listener(context)
