"""A scripted MCP server on a free port: what it says to each request is the test's."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

TOOL = {
    "name": "find",
    "description": "Finds a text",
    "inputSchema": {"type": "object", "properties": {"q": {"type": "string"}}},
}


class Asked(NamedTuple):
    """A request to the server."""

    method: str
    target: str
    headers: dict[str, str]
    message: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of a call."""
        found: dict[str, Any] = self.message["params"]["arguments"]
        return found


class Said(NamedTuple):
    """What the server says: an answer of HTTP."""

    body: bytes
    content_type: str = "application/json"
    status: str = "200 OK"
    headers: Mapping[str, str] = {}
    ends: bool = True
    """Whether the connection then ends, and the length is known."""


def answer(asked: Asked, result: Any) -> Said:
    """The right answer to a request."""
    message = {"jsonrpc": "2.0", "id": asked.message.get("id"), "result": result}
    return Said(json.dumps(message).encode())


def result(*content: Mapping[str, Any], **more: Any) -> Any:
    """The result of a call; `ScriptedMcp` makes the answer of it."""
    return {"content": list(content), **more}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


Tool = Callable[[Asked], Awaitable[Any]]


class ScriptedMcp:
    """It keeps what it was asked. By default it is a good one, with the tool `find`; a `Said` may
    be any bytes, so it can be as bad as a test wants."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.says: dict[str, Callable[[Asked], Any]] = {}
        """By the method of JSON-RPC (or of HTTP): a `Said`, or the result."""
        self.tool: Tool | None = None
        self.tools: list[Any] = [TOOL]
        self.url = ""

    @property
    def methods(self) -> list[str]:
        """What it was asked, in order."""
        return [each.message.get("method", each.method) for each in self.asked]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the request of a connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ")
            pairs = (line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            asked = Asked(method, target, headers, json.loads(body) if body else {})
            self.asked.append(asked)
            await self._say(writer, await self._said(asked))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        with suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def _said(self, asked: Asked) -> Said:
        name = asked.message.get("method", asked.method)
        if name in self.says:
            said = self.says[name](asked)
        elif name == "initialize":
            said = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}
        elif name == "tools/list":
            said = {"tools": self.tools}
        elif name == "tools/call":
            said = await self.tool(asked) if self.tool else result(text("done"))
        else:
            said = Said(b"", status="202 Accepted")
        return said if isinstance(said, Said) else answer(asked, said)

    async def _say(self, writer: asyncio.StreamWriter, said: Said) -> None:
        headers = {"content-type": said.content_type, **said.headers}
        if said.ends:
            headers.setdefault("content-length", str(len(said.body)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 {said.status}\r\n{lines}\r\n".encode() + said.body)
        await writer.drain()
        if not said.ends:
            await asyncio.Event().wait()


@asynccontextmanager
async def scripted_mcp(tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptedMcp]:
    """A scripted server, while the block runs."""
    server = ScriptedMcp()
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with suppress(asyncio.CancelledError):
            await server.serve(reader, writer)
        writer.transport.abort()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    scheme = "http" if tls is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listener.sockets[0].getsockname()[1]}/mcp"
    try:
        yield server
    finally:
        listener.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
