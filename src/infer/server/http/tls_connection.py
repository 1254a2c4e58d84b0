"""`TlsConnection`: TLS below `BoundedProtocol`, counted from the moment it is accepted"""

from __future__ import annotations

import asyncio
import math
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, cast

from infer.server.http.bounded_protocol import BoundedProtocol
from infer.server.http.connections import Connection, Connections, Use
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

READ_BYTES = 16 * 1024
"""Bytes per read; a TLS record has at most as many."""
_LOW_BYTES, _HIGH_BYTES = READ_BYTES + 4096, 2 * READ_BYTES + 8192
"""Bytes that have arrived and are not decrypted, while the HTTP connection reads nothing: reading
stops at the larger number, and goes on at the smaller one, which has room for a part of a record.
"""


class _Beginning(asyncio.Protocol):
    """Stands above TLS until the handshake is done, and then calls `begin` with the transport."""

    def __init__(self, begin: Callable[[asyncio.BaseTransport], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._begin(transport)


class TlsConnection(SSLProtocol):
    """asyncio tells a server of a TLS connection when the handshake is done; until then nobody
    counts it, and it may take a minute. Here the connection has a place in `Connections` from
    `accept` on, and `header_timeout_s` to finish the handshake. Then the HTTP connection above it
    takes over the place. One that does not finish gives way before those that have, and is counted
    among the refusals.

    asyncio's `SSLProtocol` does the work. Its buffers are made smaller: it keeps 256 KiB for each
    connection, and as much again of what has arrived and was not read.
    """

    max_size = READ_BYTES

    def __init__(
        self,
        make: Callable[[Connection], BoundedProtocol],
        context: ssl.SSLContext,
        places: Connections,
        others: set[Any],
        limits: ServerLimits = SERVER_LIMITS,
    ) -> None:
        """`make`: makes the HTTP connection above this one, once the handshake is done. `others`:
        uvicorn's set of connections; while it has this one, the server's end ends it."""
        self._timer: asyncio.TimerHandle | None = None
        super().__init__(
            asyncio.get_running_loop(),
            _Beginning(self._begin),
            context,
            cast(Any, None),  # nobody waits for the handshake
            server_side=True,
            ssl_handshake_timeout=math.ceil(2 * limits.header_timeout_s),  # ours comes first
        )
        cast(Any, self)._get_app_transport().set_read_buffer_limits(_HIGH_BYTES, _LOW_BYTES)
        self._make = make
        self._places = places
        self._others = others
        self._timeout_s = limits.header_timeout_s
        self._client: tuple[str, int] | None = None
        self._socket: Any = None
        self._is_settled = False
        """Whether the handshake is done, or why it failed is counted."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = transport
        address = transport.get_extra_info("peername")
        self._client = address[:2] if isinstance(address, tuple) else None
        if not self._places.add(self, Use.HANDSHAKE):
            self._refuse("connections")
            return
        self._others.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._refuse, "handshake_timeout")
        super().connection_made(transport)

    def _begin(self, transport: asyncio.BaseTransport) -> None:
        """Begin the HTTP connection, which takes over the place."""
        self._settle()
        above = self._make(self)
        transport.set_protocol(above)
        above.connection_made(cast(asyncio.Transport, transport))

    def _settle(self) -> None:
        self._is_settled = True
        self._others.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def _refuse(self, reason: str) -> None:
        """End the connection. Before the handshake is done no answer can be sent."""
        self._places.refusals.note(reason, self._client)
        self.give_way()

    def give_way(self) -> None:
        """See `Connection`."""
        self._settle()
        if self._socket is not None:
            self._socket.abort()

    def shutdown(self) -> None:
        """See uvicorn, which calls this for each of its connections when it ends."""
        self.give_way()

    def connection_lost(self, exc: BaseException | None) -> None:
        if isinstance(exc, ssl.SSLError) and not self._is_settled:
            self._places.refusals.note("tls_handshake", self._client)
        self._settle()
        self._places.remove(self)
        if hasattr(self._socket, "_read_ready_cb"):  # see `BoundedProtocol.connection_lost`
            self._socket._read_ready_cb = None
        self._socket = None
        super().connection_lost(exc)


def accept_tls(
    make: Callable[..., BoundedProtocol],
    context: Callable[[], ssl.SSLContext],
    places: Connections,
    limits: ServerLimits,
    **named: Any,
) -> TlsConnection:
    """What asyncio is to hand an accepted connection to. `make`: makes the HTTP connection above
    it, of `named`, which is what uvicorn gives. `context`: what a new connection has."""

    def make_above(handshake: Connection) -> BoundedProtocol:
        return make(**named, handshake=handshake)

    others = named["server_state"].connections
    return TlsConnection(make_above, context(), places, others, limits)
