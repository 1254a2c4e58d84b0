"""A TCP proxy that makes a network bad: latency, resets, half-open connections, cuts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter

KINDS = ("late", "reset", "half-open", "cut", "good")


class BadNetwork:
    """A proxy in front of a port of this machine; every connection draws what happens to it.

    "late": each piece waits for up to `latency_s`; "reset": RST in the middle; "half-open": after
    some bytes nothing passes any more, and neither side is told; "cut": the answer ends early with
    FIN; "good": nothing.
    """

    def __init__(self, port: int, seed: int, *, latency_s: float = 0.3) -> None:
        """`port`: of the server."""
        self._target, self._latency_s = port, latency_s
        self._dice = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.seen: Counter[str] = Counter()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> BadNetwork:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        kind = self._dice.choice(KINDS)
        self.seen[kind] += 1
        after = self._dice.randrange(1, 4000)
        far, far_out = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            up = asyncio.create_task(
                self._pass(near, far_out, "late" if kind == "late" else "good", 0)
            )
            await self._pass(far, near_out, kind, after)
            if kind == "half-open":
                await asyncio.sleep(3600)
            up.cancel()
            await asyncio.gather(up, return_exceptions=True)
        finally:
            if kind == "reset":
                for writer in (near_out, far_out):
                    _reset(writer)
            near_out.close()
            far_out.close()

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, kind: str, after: int
    ) -> None:
        """Copy until the end, or for "reset", "half-open" and "cut" until `after` bytes."""
        passed = 0
        with contextlib.suppress(OSError):
            while data := await source.read(4096):
                if kind == "late":
                    await asyncio.sleep(self._dice.uniform(0, self._latency_s))
                elif kind != "good" and passed + len(data) > after:
                    sink.write(data[: after - passed])
                    await sink.drain()
                    return
                passed += len(data)
                sink.write(data)
                await sink.drain()
            sink.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
