"""`McpServer`: an MCP server that the operator allows (settings `mcp_server` and `mcp_token`)"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from infer.errors import ConfigError
from infer.private_files import secret_in

MAX_SERVERS = 16
"""MCP servers of one server."""
QUERY_OF_URL = r"\?([^,\s#]+)"
"""The query of a URL, which may be a key."""
TOKEN_OF_ENTRY = r"(?:^|,)\s*[^=,]*=([^@,\s][^,]*)"
"""The token in `NAME=TOKEN`; `NAME=@FILE` has none."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9-]{0,31}"
"""A server's name: it becomes the beginning of its functions' names, before `__`."""
_HEADER = re.compile(r"([A-Za-z][A-Za-z0-9-]*): (.+)")
_OURS = frozenset(
    (
        *("accept", "accept-encoding", "connection", "expect", "host", "te", "trailer", "upgrade"),
        *("content-encoding", "content-length", "content-type", "transfer-encoding"),
        *("mcp-protocol-version", "mcp-session-id"),
    )
)
"""Headers that a request to an MCP server has in any case, or that would change its framing."""


@dataclass(frozen=True)
class McpServer:
    """Only the addresses of such settings are ever asked, so no caller can make the server ask
    another one."""

    name: str
    host: str
    port: int
    is_tls: bool
    target: str
    """Path and query."""
    header: tuple[str, str] | None = field(default=None, repr=False)
    """Name and value of the header with its key."""

    @property
    def authority(self) -> str:
        """What the header Host has."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _port_of(self.is_tls) else f"{host}:{self.port}"


def entries_of(text: str | None) -> list[str]:
    """The entries of a setting that are separated by commas."""
    return [entry.strip() for entry in text.split(",")] if text else []


def check_servers(servers: str | None, tokens: str | None) -> None:
    """Raises `ConfigError` for settings that name no servers; reads no file."""
    known = [server.name for server in _servers_of(servers)]
    named = [name for name, _ in _tokens_of(tokens)]
    for name in named:
        if name not in known:
            raise ConfigError("mcp_token", f"{name!r} is no name of an mcp_server")
    if len(named) != len(set(named)):
        raise ConfigError("mcp_token", "has a server twice")


def mcp_servers_of(servers: str | None, tokens: str | None) -> dict[str, McpServer]:
    """The servers by name, with their tokens, for which files are read. Raises `ConfigError`."""
    check_servers(servers, tokens)
    headers = {name: _header_of(name, token) for name, token in _tokens_of(tokens)}
    return {
        server.name: McpServer(
            *(server.name, server.host, server.port, server.is_tls, server.target),
            headers.get(server.name),
        )
        for server in _servers_of(servers)
    }


def _servers_of(text: str | None) -> list[McpServer]:
    known: dict[str, McpServer] = {}
    for entry in entries_of(text):
        name, _, url = entry.partition("=")
        if not re.fullmatch(_NAME, name):
            form = "an entry must be NAME=URL, whose name has letters, digits and -"
            raise ConfigError("mcp_server", f"{form}; not {_shown(entry)}")
        if name in known:
            raise ConfigError("mcp_server", f"{name!r} is given twice")
        known[name] = _server_of(name, url)
    if len(known) > MAX_SERVERS:
        raise ConfigError("mcp_server", f"may have {MAX_SERVERS} servers, not {len(known)}")
    return list(known.values())


def _server_of(name: str, url: str) -> McpServer:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = SplitResult("", "", "", "", ""), None
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    is_plain = target.isascii() and target.isprintable() and " " not in target
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host or not host.isascii() or not is_plain:
        form = f"the URL of {name!r} must be like https://tools.example.org/mcp"
        raise ConfigError("mcp_server", f"{form}, with other characters as %XX")
    if parts.username is not None or parts.password is not None:
        message = f"the URL of {name!r} has a name or password: give its key as mcp_token"
        raise ConfigError("mcp_server", message)
    is_tls = parts.scheme == "https"
    return McpServer(name, host, _port_of(is_tls) if port is None else port, is_tls, target)


def _port_of(is_tls: bool) -> int:
    return 443 if is_tls else 80


def _shown(entry: str) -> str:
    return repr(re.sub(QUERY_OF_URL, "?***", entry)[:80])


def _tokens_of(text: str | None) -> list[tuple[str, str]]:
    tokens = []
    for entry in entries_of(text):
        name, _, token = entry.partition("=")
        if not re.fullmatch(_NAME, name) or not token:
            raise ConfigError("mcp_token", "an entry must be NAME=TOKEN or NAME=@FILE")
        tokens.append((name, token))
    return tokens


def _header_of(name: str, token: str) -> tuple[str, str]:
    """The header that a token becomes: `Authorization: Bearer`, or the one that it names."""
    if token.startswith("@"):
        try:
            token = secret_in(token[1:])
        except (OSError, UnicodeDecodeError):
            raise ConfigError("mcp_token", f"the file of {name!r} cannot be read") from None
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError("mcp_token", f"that of {name!r} must be one line of ASCII characters")
    header, value = "Authorization", f"Bearer {token}"
    if given := _HEADER.fullmatch(token):
        header, value = given[1], given[2].strip()
        if header.lower() in _OURS:
            raise ConfigError("mcp_token", f"that of {name!r} cannot be the header {header}")
    return header, value
