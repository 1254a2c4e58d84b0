"""`Exchange`: one HTTP request to an MCP server, and its answer in pieces, all of it bounded"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import h11

from infer.errors import InferError
from infer.server.mcp.mcp_settings import McpServer
from infer.version import VERSION

READ_BYTES = 16 * 1024
"""Bytes that are taken from a socket at once: what the event loop does with them in one go."""
MAX_PIECES = 16_384
"""Pieces of an answer, as chunks or as they come; each takes 30 µs of the event loop."""
EVENTS_A_TURN = 64
"""Events of the parser after which others have their turn: chunks may have one byte each."""
JSON, EVENTS = "application/json", "text/event-stream"
Resolve = Callable[[str, int], Awaitable[list[Any]]]
"""`socket.getaddrinfo` for a host and a port, beside the event loop."""


class McpError(InferError):
    """What an MCP server did wrong: one sentence for callers."""


class Exchange:
    """The other side is not trusted. Redirects are not followed, compressed answers are not
    unpacked, and an answer has a limit of bytes; the caller limits its time. Each request has a
    connection of its own, which ends with it. What goes wrong is an `McpError`, one sentence
    without the address. One coroutine uses it, within `async with`."""

    def __init__(
        self, server: McpServer, resolve: Resolve, tls: ssl.SSLContext | None, max_bytes: int
    ) -> None:
        """`tls`: for a server that has it. `max_bytes`: of the answer, with its framing."""
        self._server = server
        self._resolve = resolve
        self._tls = tls
        self._max_bytes = max_bytes
        self._connection = h11.Connection(h11.CLIENT)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._num_bytes = 0
        self._num_events = 0
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Exchange:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def send(self, method: str, body: bytes, headers: list[tuple[str, str]]) -> None:
        """Send the request, and read the head of the answer. Raises `McpError`."""
        with self._as_mcp_errors():
            await self._connect()
            fixed = [
                *(("Host", self._server.authority), ("User-Agent", f"infer/{VERSION}")),
                *(("Accept", f"{JSON}, {EVENTS}"), ("Accept-Encoding", "identity")),
                *(("Connection", "close"), ("Content-Length", str(len(body)))),
                *([("Content-Type", JSON)] if body else []),
                *([self._server.header] if self._server.header else []),
            ]
            request = h11.Request(
                method=method, target=self._server.target, headers=[*fixed, *headers]
            )
            sent = [request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]
            assert self._writer is not None
            for event in sent:
                self._writer.write(self._connection.send(event) or b"")
            await self._writer.drain()
            head = await self._next_event()
            while isinstance(head, h11.InformationalResponse):
                head = await self._next_event()
        if not isinstance(head, h11.Response):
            raise McpError("it has closed the connection without an answer")
        self.status = head.status_code
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers
        }

    @property
    def content_type(self) -> str:
        """The media type of the answer, in small letters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def check(self) -> None:
        """Raise `McpError` unless the answer is a success with a body that can be read as it is."""
        if 300 <= self.status < 400:
            raise McpError(f"it redirects (HTTP {self.status}), which is never followed")
        if self.status in (401, 403):
            raise McpError(f"it refuses the key of this server (HTTP {self.status})")
        if not 200 <= self.status < 300:
            raise McpError(f"it has answered with HTTP {self.status}")
        if self.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise McpError("its answer is compressed, which was not asked for")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of the answer. Raises `McpError`."""
        while True:
            with self._as_mcp_errors():
                event = await self._next_event()
            if not isinstance(event, h11.Data):
                return
            yield bytes(event.data)

    async def _connect(self) -> None:
        server, error = self._server, None
        for *_, address in (await self._resolve(server.host, server.port))[:4]:
            try:
                self._reader, self._writer = await asyncio.open_connection(
                    *address[:2],
                    limit=READ_BYTES,
                    ssl=self._tls,
                    server_hostname=server.host if self._tls else None,
                )
                return
            except OSError as failed:
                error = failed
        raise error or OSError("no address")

    async def _next_event(self) -> Any:
        assert self._reader is not None
        self._num_events += 1
        if self._num_events > MAX_PIECES:
            raise McpError(f"its answer comes in more than {MAX_PIECES} pieces")
        if self._num_events % EVENTS_A_TURN == 0:
            await asyncio.sleep(0)
        while (event := self._connection.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(READ_BYTES)
            self._num_bytes += len(data)
            if self._num_bytes > self._max_bytes:
                raise McpError(f"its answer has more than {self._max_bytes} bytes")
            self._connection.receive_data(data)
        return event

    @contextlib.contextmanager
    def _as_mcp_errors(self) -> Iterator[None]:
        try:
            yield
        except ssl.SSLError:
            raise McpError("its certificate or its TLS is not valid") from None
        except (OSError, UnicodeError):
            raise McpError("it cannot be reached, or has broken the connection") from None
        except h11.RemoteProtocolError:
            raise McpError("its answer is no valid HTTP") from None
