"""`SocketLink`: a `Link` to an engine of this machine by a socket; `serve_link`: its other end"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator

from infer.replicas.host import ReplicaHost
from infer.replicas.link_transport import PAUSE_S, LinkBrokenError
from infer.replicas.messages import FrameBuffer, Loss, frame_of

_PIECE = 1 << 18
"""Bytes that are read from a socket at once."""


class SocketLink:
    """What has the engine's process serves several others. Each has a socket pair for each engine,
    which carries the frames of a link in both directions and lasts as long as both processes. A
    link that the host has dropped is lost to the front (`Loss`), and the next one begins on the
    same socket. A `Link`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()

    def connect(self) -> Iterator[bytes]:
        """See `Link`."""
        while True:
            try:
                data = self._sock.recv(_PIECE)
            except OSError as error:
                raise LinkBrokenError(str(error), is_final=True) from error
            if not data:
                raise LinkBrokenError("the process that has the engine has gone", is_final=True)
            yield data

    def offset_s(self) -> float:
        """See `Link`: it is the same clock."""
        return 0.0

    def send(self, frames: bytes) -> None:
        """See `Link`. The other end reads at any time."""
        try:
            with self._sending:
                self._sock.sendall(frames)
        except OSError as error:
            raise LinkBrokenError(str(error), is_final=True) from error

    def close(self) -> None:
        """See `Link`."""
        with contextlib.suppress(OSError):  # the other end has gone
            self._sock.shutdown(socket.SHUT_RDWR)


async def serve_link(host: ReplicaHost, front: str, sock: socket.socket) -> None:
    """Serve a front at its socket, which does not block, until the front closes it or has gone.
    Then the requests that it had are dropped."""
    ways = [asyncio.ensure_future(way(host, front, sock)) for way in (_apply_commands, _send_items)]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        host.detach(front)


async def _apply_commands(host: ReplicaHost, front: str, sock: socket.socket) -> None:
    loop, buffer = asyncio.get_running_loop(), FrameBuffer()
    with contextlib.suppress(OSError):
        while data := await loop.sock_recv(sock, _PIECE):
            buffer.add(data)
            host.command(front, buffer.whole())


async def _send_items(host: ReplicaHost, front: str, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    lost = frame_of(Loss("the link to it has been dropped", from_outside=True))
    with contextlib.suppress(OSError):
        while True:
            async for item in link_items(host, front):
                await loop.sock_sendall(sock, item)
            await loop.sock_sendall(sock, lost)
            await asyncio.sleep(PAUSE_S)


async def link_items(
    host: ReplicaHost, front: str, *, every_s: float = 0.0
) -> AsyncIterator[bytes]:
    """The items for a front until its link ends, each with all that has happened since the last.

    `every_s`: seconds between two of them, at least.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    next_s = loop.time()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so will the link
            loop.call_soon_threadsafe(arrived.set)

    link = host.attach(front, wake)
    try:
        while True:
            if (early_s := next_s - loop.time()) > 0:
                await asyncio.sleep(early_s)
            arrived.clear()
            if (item := link.take()) is not None:
                next_s = loop.time() + every_s
                yield item
            elif link.is_closed:
                return
            else:
                await arrived.wait()
    finally:
        host.detach(front, link)
