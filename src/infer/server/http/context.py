"""`RequestContext`: one HTTP request, from its headers to the last byte of its answer.

Made by the outermost layer (`failures.Edge`) and found in the ASGI scope by everybody further in.
Whatever a request holds that must be given back however it ends (its trace, its place among the
requests of its key, a timer) is registered in `leaving`, which is closed in that one place.
"""

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

KEY = "infer.visit"
HARMLESS = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""what of a client's own words goes into a header of the answer"""


def _new_id() -> str:
    return secrets.token_hex(16)


@dataclass(eq=False)
class RequestContext:
    """See the module's docstring."""

    method: str = ""
    path: str = ""
    id: str = field(default_factory=_new_id)
    """made here; 128 bits of chance"""
    client_id: str | None = None
    """the client's `x-request-id`: echoed and shown, never a key"""
    client: str | None = None
    """address and port of whoever has connected; None: it has none"""
    received_s: float = field(default_factory=time.monotonic)
    received_at: float = field(default_factory=time.time)
    traceparent: str | None = None
    """the caller's span, where there is one"""
    key_name: str = ""
    """of the API key; "" where there are none"""
    tenant: object = None
    """whose it is: set by `tenants.Gate`"""
    model: str = ""
    """whose it is, of several"""
    headers: list[tuple[str, str]] = field(default_factory=list)
    """that the answer gets"""
    status: int = 0
    """of the answer, once there is one"""
    trace_summary: dict[str, Any] = field(default_factory=dict)
    """summary of its trace once that has ended, for the log"""
    on_revoked: Callable[[], object] | None = None
    """ends what runs, when the key has been revoked"""
    cleanup: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, scope: Scope) -> RequestContext:
        """The visit of an ASGI scope; made the first time that it is asked for."""
        context = scope.get(KEY)
        if context is None:
            context = scope[KEY] = cls(scope["method"], scope["path"])
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
        """What the answer's `x-request-id` is."""
        return self.client_id or self.id
