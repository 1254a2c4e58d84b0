"""`HostGuard`: refuses requests of other sites' pages to a server without keys on loopback"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.server.http.connections import note_refusal
from infer.server.http.error_responses import describe
from infer.server.http.host_rules import HostRules


class HostGuard:
    """`HostRules` says which requests these are."""

    def __init__(
        self, app: ASGIApp, *, has_keys: bool, hosts: Sequence[str], origins: Sequence[str]
    ) -> None:
        self._app = app
        self._rules = HostRules(has_keys=has_keys, hosts=hosts, origins=origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server = scope.get("server")
        if scope["type"] == "http" and server:
            method, path = scope.get("method", ""), scope.get("path", "")
            refused = self._rules.refusal(server[0], method, path, Headers(scope=scope))
            if refused is not None:
                reason, error = refused
                note_refusal(scope, reason)
                await describe(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
