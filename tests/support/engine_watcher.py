"""A client of the stream of an engine's steps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from infer.cli.engine_state import rows_of
from infer.server.route_table import EVENTS_PATH
from tests.support.serving import App
from tests.support.waits import until_async


def entries_of(frame: dict[str, Any], name: str) -> list[Any]:
    """The entries of a field; the rows of a table, and the pairs of numbers and tokens."""
    field = frame.get(name, [])
    if name == "tokens":
        return list(dict(field).items())
    return list(rows_of(field)) if isinstance(field, dict) else list(field)


class Watcher:
    """A viewer's stream, read as a client reads it."""

    def __init__(self) -> None:
        self.leave = asyncio.Event()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.num_bytes = 0
        self.status = 0
        self._rest = b""

    def read(self, data: bytes) -> None:
        """Take what was written."""
        self.num_bytes += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        for each in whole:
            kind, line = each.decode("ascii").split("\n")
            self.events.append(
                (kind.removeprefix("event: "), json.loads(line.removeprefix("data: ")))
            )

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [fields for kind, fields in self.events if kind == "frame"]

    def all(self, name: str) -> list[Any]:
        """The entries of one field of all frames."""
        return [entry for frame in self.frames for entry in entries_of(frame, name)]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [event for event in self.all("events") if event["event"] == kind]


@asynccontextmanager
async def watching(app: App, query: str = "", **headers: str) -> AsyncIterator[Watcher]:
    """Watch from the state of all requests on; leaves at the end."""
    watcher = Watcher()

    async def watch() -> None:
        path = EVENTS_PATH + query
        reply = await app.send(
            "GET", path, headers=headers, leave=watcher.leave, on_write=watcher.read
        )
        watcher.status = reply.status

    task = asyncio.ensure_future(watch())
    try:
        await until_async(lambda: bool(watcher.frames) or task.done())
        yield watcher
    finally:
        watcher.leave.set()
        await task
