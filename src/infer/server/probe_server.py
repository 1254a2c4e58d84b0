"""`ProbeServer`: health and metrics on a port of their own, without a key, and nothing else"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from infer.server.http.bounded_protocol import BoundedProtocol
from infer.server.http.connections import KEY, ConnectionLimits, Connections
from infer.server.http.error_responses import RequestBoundary, error_handlers
from infer.server.http.hosts import HostGuard
from infer.server.http.uvicorn_config import uvicorn_config
from infer.server.observe.logs import log_request
from infer.server.offload import Offload
from infer.server.request_views import RequestViews
from infer.server.route_table import PROBE_ROUTES, routes_of
from infer.server.settings import ServerSettings
from infer.server.tenancy.limits import AuthMiddleware

MAX_CONNECTIONS = 64
"""Connections that may be open here; unused ones give way."""


class _AsTheServer:
    """A layer with which requests find the connections of the server, not those of this port."""

    def __init__(self, app: ASGIApp, places: Connections) -> None:
        self._app = app
        self._places = places

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[KEY] = self._places
        await self._app(scope, receive, send)


class ProbeServer:
    """It has connections of its own, so neither clients nor scrapes take places from each other. It
    answers until the very end, also while the server's own port is closed already. The rules for
    hosts hold as on a server without keys. Lives on the event loop."""

    def __init__(
        self,
        sock: socket.socket,
        views: RequestViews,
        settings: ServerSettings,
        places: Connections,
    ) -> None:
        """`views`: who answers. `places`: the server's connections, whose numbers are shown."""
        self._sock = sock
        self._offload = Offload(settings.limits)
        app = Starlette(
            routes=routes_of(views, self._offload, rows=PROBE_ROUTES),
            exception_handlers=error_handlers(settings.status_when_full),
            middleware=[
                Middleware(RequestBoundary, settings.write_stall_s, on_end=(log_request,)),
                Middleware(
                    HostGuard, has_keys=False, hosts=settings.hosts, origins=settings.origins
                ),
                Middleware(AuthMiddleware, keys=None),
                Middleware(_AsTheServer, places=places),
            ],
        )
        app.router.redirect_slashes = False
        self._config = uvicorn_config(
            app,
            functools.partial(
                BoundedProtocol,
                write_stall_s=settings.write_stall_s,
                places=Connections(ConnectionLimits(MAX_CONNECTIONS, 4)),
                limits=settings.limits,
            ),
            lifespan="off",
        )
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._make: Callable[[], asyncio.Protocol] | None = None

    async def start(self, begun: Sequence[socket.socket] = ()) -> None:
        """Answer. `begun`: connections that have been accepted before."""
        self._config.load()
        loop = asyncio.get_running_loop()
        self._make = make = functools.partial(
            cast(Callable[..., Any], self._config.http_protocol_class),
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=loop,
        )
        self._server = await loop.create_server(make, sock=self._sock)
        for connection in begun:
            await self.take(connection)

    async def take(self, connection: socket.socket) -> None:
        """Serve a connection that has been accepted elsewhere; after `start`."""
        assert self._make is not None
        with contextlib.suppress(OSError):  # it has gone
            await asyncio.get_running_loop().connect_accepted_socket(self._make, connection)

    async def close(self) -> None:
        """Close the port, and the connections once they are answered."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        self._offload.close()
