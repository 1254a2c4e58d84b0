"""`McpSession`: a conversation with an MCP server by Streamable HTTP: its tools and calls"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from infer.server.mcp.http_exchange import EVENTS, JSON, Exchange, McpError, Resolve
from infer.server.mcp.mcp_settings import McpServer
from infer.types.server_limits import ServerLimits
from infer.version import VERSION

T = TypeVar("T")


class Run(Protocol):
    """Runs work on the bytes that have come, beside the event loop if they are many."""

    def __call__(self, num_bytes: int, work: Callable[[], T]) -> Awaitable[T]: ...


Result = dict[str, Any]

PROTOCOL_VERSION = "2025-06-18"
KNOWN_VERSIONS = ("2024-11-05", "2025-03-26", PROTOCOL_VERSION, "2025-11-25")
"""Versions that a server may answer with; what is used here is the same in all of them."""
MAX_PAGES = 16
"""Pages of a list of tools."""
MAX_TOOLS = 128
"""Tools of one server."""
MAX_SCHEMA_BYTES = 16 * 1024
"""Bytes of the schema of a tool's arguments, as JSON."""
MAX_SCHEMA_DEPTH = 32
MAX_DESCRIPTION_CHARS = 2000
MAX_TEXT_CHARS = 64 * 1024
"""Characters of the result of a call."""
MAX_EVENTS = 1000
"""Events of a stream before the one that is the answer."""
MAX_WORDS_CHARS = 200
"""Characters of what a server says about an error."""
END_S = 1.0
"""Time that a server has to take note of a session's end."""
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SESSION_HEADER = "Mcp-Session-Id"
_SESSION = re.compile(r"[\x21-\x7e]{1,256}")


class McpTool(NamedTuple):
    """A tool of an MCP server."""

    name: str
    description: str
    schema: dict[str, Any]
    """JSON Schema of the arguments."""


class McpTools(NamedTuple):
    """The tools of a server, and those that cannot be used."""

    tools: list[McpTool]
    left_out: list[tuple[str, str]]
    """(name, why), as far as there are names."""


class McpResult(NamedTuple):
    """The result of a call."""

    text: str
    is_error: bool
    """Whether the tool says that it has failed."""


class McpSession:
    """It begins with `initialize`, and ends with what was asked. Messages are JSON-RPC; an answer
    is JSON, or an event among others of a stream. What the other side says is checked and bounded
    before anybody sees it; see `http_exchange`. One coroutine uses it, after `begin`; then it must
    `end`."""

    def __init__(
        self,
        server: McpServer,
        resolve: Resolve,
        tls: ssl.SSLContext | None,
        run: Run,
        limits: ServerLimits,
    ) -> None:
        self._server = server
        self._resolve = resolve
        self._tls = tls
        self._run = run
        self._max_bytes = limits.max_mcp_bytes
        self._ids = itertools.count(1)
        self._headers: list[tuple[str, str]] = []

    async def begin(self) -> None:
        """Raises `McpError`."""
        client = {"name": "infer", "version": VERSION}
        params = {"protocolVersion": PROTOCOL_VERSION, "capabilities": {}, "clientInfo": client}
        version = await self._ask("initialize", params, _version_in)
        self._headers.append(("MCP-Protocol-Version", version))
        message = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        async with self._exchange() as exchange:
            await exchange.send("POST", _dump(message), self._headers)
            exchange.check()

    async def end(self) -> None:
        """Tell the server that nothing more is asked, if it has a session; it need not answer."""
        if any(name == _SESSION_HEADER for name, _ in self._headers):
            with contextlib.suppress(McpError, TimeoutError):
                async with asyncio.timeout(END_S), self._exchange() as exchange:
                    await exchange.send("DELETE", b"", self._headers)

    async def tools(self) -> McpTools:
        """The server's tools. Raises `McpError`."""
        tools, seen = McpTools([], []), {""}
        cursor = await self._ask("tools/list", {}, partial(_add_all, tools))
        while cursor is not None:
            if not isinstance(cursor, str) or cursor in seen or len(seen) >= MAX_PAGES:
                raise McpError("its list of tools does not end")
            seen.add(cursor)
            cursor = await self._ask("tools/list", {"cursor": cursor}, partial(_add_all, tools))
        return tools

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> McpResult:
        """What a tool gives. Raises `McpError`."""
        return await self._ask("tools/call", {"name": tool, "arguments": arguments}, _result_of)

    def _exchange(self) -> Exchange:
        return Exchange(self._server, self._resolve, self._tls, self._max_bytes)

    async def _ask(self, method: str, params: Mapping[str, Any], read: Callable[[Result], T]) -> T:
        """What `read` makes of the result of a request."""
        number = next(self._ids)
        message = {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        data = await self._run(0, partial(_dump, message))
        async with self._exchange() as exchange:
            await exchange.send("POST", data, self._headers)
            exchange.check()
            if method == "initialize":
                self._note_session(exchange.headers)
            if exchange.content_type == JSON:
                body = b"".join([piece async for piece in exchange.pieces()])
                work = partial(_read, body, number, read)
                for result in await self._run(len(body), work):
                    return result
                raise McpError("its answer is no JSON-RPC response")
            if exchange.content_type == EVENTS:
                return await self._answer_in(exchange, number, read)
        raise McpError("its answer is neither JSON nor events: is the URL that of MCP?")

    def _note_session(self, headers: Mapping[str, str]) -> None:
        session = headers.get(_SESSION_HEADER.lower())
        if session is None:
            return
        if not _SESSION.fullmatch(session):
            raise McpError("its session has a name with impossible characters")
        self._headers.append((_SESSION_HEADER, session))

    async def _answer_in(self, exchange: Exchange, number: int, read: Callable[[Result], T]) -> T:
        """The first response among the events; notifications and requests are passed over."""
        splitter, num_events = EventSplitter(), 0
        async for piece in exchange.pieces():
            for event in splitter.add(piece):
                num_events += 1
                if num_events > MAX_EVENTS:
                    raise McpError(f"its stream has more than {MAX_EVENTS} events and no answer")
                work = partial(_read_event, event, number, read)
                for result in await self._run(len(event), work):
                    return result
        raise McpError("its stream has ended without an answer")


class EventSplitter:
    """Splits a stream of server-sent events into events, with LF at the ends of their lines."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """What has come of the event that is not complete."""
        self._is_after_cr = False
        """Whether an LF that comes next belongs to the end of a line."""

    def add(self, piece: bytes) -> Iterator[bytes]:
        """Yield each event that is complete now, unless it is empty."""
        if self._is_after_cr:
            piece = piece.removeprefix(b"\n")
        self._is_after_cr = piece.endswith(b"\r")
        piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if self._parts and self._parts[-1].endswith(b"\n"):
            piece, self._parts[-1] = b"\n" + piece, self._parts[-1][:-1]
        first, *others = piece.split(b"\n\n")
        self._parts.append(first)
        if others:
            complete = [b"".join(self._parts), *others[:-1]]
            self._parts = [others[-1]]
            yield from filter(bytes.strip, complete)


def _dump(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _read_event(event: bytes, number: int, read: Callable[[Result], T]) -> list[T]:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return _read(b"\n".join(lines), number, read) if lines else []


def _read(data: bytes, number: int, read: Callable[[Result], T]) -> list[T]:
    """What `read` makes of the result in a message; empty where it is no response. Raises
    `McpError`."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise McpError("its answer is no JSON") from None
    if not isinstance(message, dict) or not {"result", "error"} & message.keys():
        return []
    if "error" in message:
        error = message["error"]
        said = error.get("message") if isinstance(error, dict) else None
        words = words_of(said if isinstance(said, str) else "", MAX_WORDS_CHARS)
        raise McpError(f"it says: {words}" if words else "it answers with an error")
    # A truth value is a number in Python.
    if type(message.get("id")) is not int or message["id"] != number:
        raise McpError("it has answered another request than this one")
    if not isinstance(message["result"], dict):
        raise McpError("its result is no object")
    return [read(message["result"])]


def _version_in(result: Result) -> str:
    version = result.get("protocolVersion")
    if version not in KNOWN_VERSIONS:
        raise McpError("it speaks another version of the protocol")
    return str(version)


def _add_all(tools: McpTools, result: Result) -> Any:
    """Add the tools of a page; returns the name of the next one."""
    listed = result.get("tools")
    if not isinstance(listed, list):
        raise McpError("its list of tools is no list")
    if len(tools.tools) + len(tools.left_out) + len(listed) > MAX_TOOLS:
        raise McpError(f"it has more than {MAX_TOOLS} tools")
    for tool in listed:
        _add(tools, tool)
    return result.get("nextCursor")


def _result_of(result: Result) -> McpResult:
    content, is_error = result.get("content", []), result.get("isError", False)
    if not isinstance(content, list) or not isinstance(is_error, bool):
        raise McpError("its result of a call is no list of contents")
    text = "\n".join(_texts(content, MAX_TEXT_CHARS))
    if not content and "structuredContent" in result:
        text = json.dumps(result["structuredContent"], ensure_ascii=False)
    if len(text) > MAX_TEXT_CHARS:
        cut = f"[cut here: a result has at most {MAX_TEXT_CHARS} characters]"
        text = f"{text[:MAX_TEXT_CHARS]}\n{cut}"
    return McpResult(_encodable(text), is_error)


def words_of(text: str, max_chars: int) -> str:
    """A text of the other side as one line without control characters."""
    shown = "".join(char if char.isprintable() else " " for char in text[: 2 * max_chars])
    return " ".join(shown.split())[:max_chars]


def _add(tools: McpTools, tool: Any) -> None:
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        tools.left_out.append(("", "it has no name"))
        return
    shown = words_of(name, 64)
    description, schema = tool.get("description", ""), tool.get("inputSchema")
    reason = ""
    if not _TOOL_NAME.fullmatch(name):
        reason = "a name has 64 letters, digits and ._- at most"
    elif any(known.name == name for known in tools.tools):
        reason = "there is another tool of this name"
    elif not isinstance(schema, dict) or schema.get("type", "object") != "object":
        reason = "the schema of its arguments is not that of an object"
    elif _depth(schema) > MAX_SCHEMA_DEPTH:
        reason = f"the schema of its arguments is nested more than {MAX_SCHEMA_DEPTH} deep"
    elif len(_dump(schema)) > MAX_SCHEMA_BYTES:
        reason = f"the schema of its arguments has more than {MAX_SCHEMA_BYTES} bytes"
    if reason:
        tools.left_out.append((shown, reason))
        return
    text = description if isinstance(description, str) else ""
    tools.tools.append(McpTool(name, _encodable(text[:MAX_DESCRIPTION_CHARS]), schema))


def _depth(value: Any) -> int:
    """How deep lists and objects are nested; no deeper than is asked."""
    level, depth = [value], 0
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        inner: list[Any] = []
        for node in level:
            members = node.values() if isinstance(node, dict) else node
            inner += [member for member in members if isinstance(member, dict | list)]
        level = inner
    return depth


def _encodable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON can have and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _texts(content: list[Any], max_chars: int) -> Iterator[str]:
    """The contents as texts; what is none is named."""
    num_chars = 0
    for part in content:
        shown = _text_of(part if isinstance(part, dict) else {})
        yield shown
        num_chars += len(shown) + 1
        if num_chars > max_chars:
            return


def _text_of(part: dict[str, Any]) -> str:
    kind, resource = part.get("type"), part.get("resource")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "resource" and isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    where = resource if isinstance(resource, dict) else part
    named = [where.get(key) for key in ("mimeType", "name", "uri")]
    words = " ".join(words_of(word, 100) for word in named if isinstance(word, str))
    data = where.get("data", where.get("blob"))
    size = f", {len(data) * 3 // 4} bytes" if isinstance(data, str) else ""
    what = words_of(kind, 20) if isinstance(kind, str) else "content"
    return f"[{what}{' ' if words else ''}{words}{size}: not shown]"
