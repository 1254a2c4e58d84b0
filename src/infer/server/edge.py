"""The outermost ASGI layer: ids on every response, and an answer to what nobody expected.

Gives each request a 128-bit id of our own (`scope["state"]["request_id"]`), or the client's
`x-request-id` where it is harmless; it is echoed and logged and never used as a key. An exception
that reaches this layer is logged with its traceback and answered with a fixed 500 body. Plain
ASGI on purpose: a wrapping middleware class would put a queue between handler and socket and hide
`http.disconnect` from it.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.server.failures import ClientGone, describe

log = logging.getLogger("infer.server")

_HARMLESS_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """The client's id where it is one line of harmless characters, else a fresh one."""
    offered = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(offered) == 1 and _HARMLESS_ID.fullmatch(offered[0]):
        return bytes(offered[0]).decode("ascii")
    return secrets.token_hex(16)


class Edge:
    """Wraps the app; see the module's docstring."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode("ascii")),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            log.debug("request %s: the client has left", request_id)
        except Exception as error:
            log.exception("request %s failed", request_id)
            if not started:
                await describe(error).response()(scope, receive, send_with_id)
