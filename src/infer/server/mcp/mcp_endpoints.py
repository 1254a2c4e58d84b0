"""`McpEndpoints`: the tools of the MCP servers that the operator allows, and calls of them"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from infer.errors import OverloadedError
from infer.server.body_reader import BodyReader
from infer.server.http.error_responses import HttpError
from infer.server.http.fair_threads import FairThreads
from infer.server.mcp.http_exchange import McpError
from infer.server.mcp.mcp_client import McpSession, McpTools
from infer.server.mcp.mcp_settings import McpServer, mcp_servers_of
from infer.server.offload import Offload
from infer.server.openai.large_json import json_response
from infer.server.openai.openapi import takes
from infer.server.openai.schema import Body
from infer.server.openai.streaming import all_of, unless_gone
from infer.server.settings import ServerSettings
from infer.server.tenancy.key_places import KeyPlaces
from infer.server.tenancy.limits import tenant_of

T = TypeVar("T")
R = TypeVar("R")
MAX_NAME_CHARS = 128
_BYTES_A_TOOL = 2000
"""Size of a tool in an answer, about."""


class McpCallBody(Body):
    """`POST /v1/mcp/call`."""

    server: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    tool: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]


class McpCalls:
    """Conversations with MCP servers, of which each key has a part. Lives on the event loop."""

    def __init__(
        self, servers: dict[str, McpServer], offload: Offload, settings: ServerSettings
    ) -> None:
        self.servers = servers
        self._offload = offload
        self._limits = settings.limits
        self._names = FairThreads(2, "infer-mcp-names")
        """Look up the addresses of hosts."""
        self._places = KeyPlaces(
            "calls of MCP servers", self._limits.max_mcp_calls_of_key, self._limits.max_mcp_calls
        )
        needs_tls = any(mcp_server.is_tls for mcp_server in servers.values())
        self._tls = ssl.create_default_context() if needs_tls else None

    @contextlib.contextmanager
    def place(self, owner: str) -> Iterator[None]:
        """A place of a key until the block ends. Raises 429, or `OverloadedError`."""
        if not self._places.has_room(owner):
            raise OverloadedError("too many calls of MCP servers are running")
        self._places.acquire(owner)
        try:
            yield
        finally:
            self._places.release(owner)

    async def ask(
        self,
        http: HttpRequest,
        server: McpServer,
        max_s: float,
        what: Callable[[McpSession], Awaitable[T]],
    ) -> T:
        """What `what` asks a server. Raises `McpError`, and `TimeoutError` after `max_s`."""

        async def run(num_bytes: int, work: Callable[[], R]) -> R:
            is_long = num_bytes > self._limits.long_body_bytes
            return await self._offload.run(http, work, heavy=is_long)

        resolve = partial(self._resolve, tenant_of(http.scope).key.id)
        tls = self._tls if server.is_tls else None
        session = McpSession(server, resolve, tls, run, self._limits)
        try:
            async with asyncio.timeout(max_s):
                await session.begin()
                answer = await what(session)
        except McpError:
            await session.end()
            raise
        await session.end()
        return answer

    async def _resolve(self, owner: str, host: str, port: int) -> list[Any]:
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        addresses: list[Any] = await self._names.submit(owner, look_up, lambda: None)
        return addresses

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._names.close()


class McpEndpoints:
    """Whoever may use this server may call them, with the server's key of each, which no caller
    sees. What an MCP server does wrong is one sentence; it cannot keep a call for longer than its
    time."""

    def __init__(self, offload: Offload, bodies: BodyReader, settings: ServerSettings) -> None:
        """Raises `ConfigError` for a file with a token that cannot be read."""
        servers = mcp_servers_of(settings.mcp_server, settings.mcp_token)
        self._calls = McpCalls(servers, offload, settings)
        self._offload = offload
        self._bodies = bodies
        self._limits = settings.limits

    @takes(refuses=(429,))
    async def mcp_servers(self, http: HttpRequest) -> Response:
        """The MCP servers that the operator allows, and their tools."""
        owner = tenant_of(http.scope).key.id
        servers = self._calls.servers.values()
        if not servers:
            return json_response({"object": "list", "data": []})
        with self._calls.place(owner):
            asked = (self._shown(http, server) for server in servers)
            data = await unless_gone(http.receive, all_of(asked))
        num_bytes = _BYTES_A_TOOL * sum(len(server["tools"]) for server in data)
        answer = {"object": "list", "data": data}
        return await self._offload.render(http, num_bytes, json_response, answer)

    @takes(McpCallBody, refuses=(429, 502, 504))
    async def mcp_call(self, http: HttpRequest) -> Response:
        """Call a tool of an MCP server."""
        body = await self._bodies.read_object(http)
        wire = await self._bodies.validate(http, McpCallBody, body)
        server = self._calls.servers.get(wire.server)
        if server is None:
            message = "there is no such MCP server: infer serve --mcp-server NAME=URL allows one"
            raise HttpError(404, message, param="server", code="mcp_server_not_found")
        with self._calls.place(tenant_of(http.scope).key.id):
            call = self._called(http, server, wire)
            result = await unless_gone(http.receive, call)
        return await self._offload.render(http, len(result["content"]), json_response, result)

    async def _shown(self, http: HttpRequest, server: McpServer) -> dict[str, Any]:
        listed, error = McpTools([], []), None
        try:
            listed = await self._calls.ask(http, server, self._limits.mcp_list_s, McpSession.tools)
        except McpError as failed:
            error = f"The MCP server {server.name!r} cannot be used: {failed}"
        except TimeoutError:
            error = self._late(server, self._limits.mcp_list_s)
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in listed.tools
        ]
        left_out = [{"name": name, "reason": reason} for name, reason in listed.left_out]
        return {"name": server.name, "tools": tools, "left_out": left_out, "error": error}

    async def _called(
        self, http: HttpRequest, server: McpServer, wire: McpCallBody
    ) -> dict[str, Any]:
        async def call(session: McpSession) -> Any:
            return await session.call(wire.tool, wire.arguments)

        kind = "api_error"
        try:
            result = await self._calls.ask(http, server, self._limits.mcp_call_s, call)
        except McpError as failed:
            message = f"The MCP server {server.name!r} has failed: {failed}"
            raise HttpError(502, message, code="mcp_server_failed", type=kind) from None
        except TimeoutError:
            message = self._late(server, self._limits.mcp_call_s)
            raise HttpError(504, message, code="mcp_server_timeout", type=kind) from None
        fields = {"server": server.name, "tool": wire.tool, "content": result.text}
        return {"object": "mcp.result", **fields, "is_error": result.is_error}

    def _late(self, server: McpServer, max_s: float) -> str:
        return f"The MCP server {server.name!r} has not answered after {max_s:g} s"

    def close(self) -> None:
        """End the threads, without waiting for them."""
        self._calls.close()
