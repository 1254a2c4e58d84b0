"""`RequestContext`: the state of one HTTP request, from its headers to its answer's last byte"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from infer.server.http.request_head import HARMLESS

KEY = "infer.request_context"
"""Key of the context in an ASGI scope."""


def bare_id(name: str) -> str:
    """The id of a context in the id of an answer, which begins with what the API calls answers."""
    return re.split("[-_]", name)[-1]


def _new_id() -> str:
    return secrets.token_hex(16)


@dataclass(eq=False)
class RequestContext:
    """The outermost layer (`RequestBoundary`) makes it and puts it into the ASGI scope, where all
    others find it. Everything that a request holds and that must be released however it ends (its
    trace, its place among the requests of its key, a timer) is registered in `cleanup`, which
    `RequestBoundary` closes."""

    method: str = ""
    path: str = ""
    id: str = field(default_factory=_new_id)
    """Random id of the request: 128 bits in hexadecimal."""
    client_id: str | None = None
    """The client's `x-request-id`; it is echoed and shown, and never used as a key."""
    client: str | None = None
    """Address and port of the client; None if it has none (a Unix socket)."""
    received_s: float = field(default_factory=time.monotonic)
    """Time of arrival in seconds, on the monotonic clock."""
    received_at: float = field(default_factory=time.time)
    """Time of arrival in seconds since the epoch."""
    traceparent: str | None = None
    """The caller's span, as the header `traceparent` has it."""
    key_name: str = ""
    """Name of the API key; empty without keys."""
    tenant: object = None
    """The `Tenant` of the request; set by `AuthMiddleware`."""
    model: str = ""
    """Name of the model that the request is for; empty while that is not known."""
    headers: list[tuple[str, str]] = field(default_factory=list)
    """Headers to add to the answer."""
    status: int = 0
    """HTTP status of the answer; 0 before there is one."""
    trace_summary: dict[str, Any] = field(default_factory=dict)
    """Summary of the request's trace for the log; empty before the trace has ended."""
    on_revoked: Callable[[], object] | None = None
    """Ends the running work of the request; called when its key has been revoked."""
    cleanup: ExitStack = field(default_factory=ExitStack)
    """Callbacks that release what the request holds; run when it has ended."""

    @classmethod
    def of(cls, scope: Scope, id_prefix: str = "") -> RequestContext:
        """The context of an ASGI scope; the first call makes it, with an id that begins with
        `id_prefix` (hexadecimal digits)."""
        context = scope.get(KEY)
        if context is None:
            context = scope[KEY] = cls(scope["method"], scope["path"])
            if id_prefix:
                context.id = id_prefix + context.id[len(id_prefix) :]
            headers = Headers(scope=scope)
            if scope.get("client"):
                host, port = scope["client"]
                context.client = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            offered = headers.getlist("x-request-id")
            if len(offered) == 1 and HARMLESS.fullmatch(offered[0]):
                context.client_id = offered[0]
            context.traceparent = headers.get("traceparent")
        assert isinstance(context, RequestContext)
        return context

    @property
    def shown_id(self) -> str:
        """Value of the answer's `x-request-id`: the client's, if it sent one, else our own."""
        return self.client_id or self.id

    @property
    def standard_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that every answer gets. Anthropic's clients read the id from `request-id`."""
        request_id = self.shown_id.encode("ascii")
        return [
            (b"x-request-id", request_id),
            (b"request-id", request_id),
            (b"x-content-type-options", b"nosniff"),
        ]
