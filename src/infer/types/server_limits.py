"""`ServerLimits`: what a connection, a body or a trace may cost the server, and for how long"""

from __future__ import annotations

from dataclasses import dataclass

MIN_CONNECTIONS = 4
"""Number of connections below which a server does not start."""
DEFAULT_CONNECTIONS = 1024
MAX_CONNECTIONS = 1_000_000
"""About as many file descriptors as Linux lets a process have (`fs.nr_open`)."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """These numbers are no options, because no operator has needed another value. They come through
    constructors, so a test can use small ones. Names that end in `_s` are seconds."""

    probe_connections: int = 8
    """Connections beside `ServerSettings.max_connections`, for health probes when all others are in
    use."""
    send_buffer_bytes: int = 128 * 1024
    """Size of a connection's send buffer in the kernel, which takes twice as much. By default it
    may be megabytes, and a client that reads nothing is noticed only when they are full."""
    header_timeout_s: float = 10.0
    """Time within which request line and headers must be complete."""
    linger_s: float = 5.0
    """Time for which the rest of a body is read whose request has been answered already."""
    body_timeout_s: float = 30.0
    """Time for a body to arrive; then it is answered with 408."""
    long_body_bytes: int = 16 * 1024
    """Size above which a body is parsed, checked and tokenised off the event loop."""
    max_long_bodies: int = 64
    """Long bodies that are worked on or wait for it; further ones are refused (503)."""
    max_long_bodies_of_key: int = 16
    """Long bodies of one key, whose `max_concurrent` is a limit too; further ones get 429."""
    max_jobs: int = 1024
    """Chats to render and grammars to check that are worked on or wait; further ones get 503."""
    max_jobs_of_key: int = 128
    """Those of one key; further ones get 429."""
    max_grammar_mib: int = 256
    """Memory of the compiled grammars of all open requests, in MiB; further ones get 503."""
    max_grammar_mib_of_key: int = 128
    """That of one key's; further ones get 429."""
    max_traces: int = 1024
    """Ended traces that are kept of all owners together."""
    max_traces_of_owner: int = 256
    """Ended traces that are kept for one owner."""
    max_trace_events: int = 128
    """Events of one trace; further ones are counted only."""
    status_s: float = 1.0
    """Time of silence after which a stream whose client has asked for it says why, and between two
    times that it does."""
    max_kept_bytes: int = 64 * 1024 * 1024
    """Bytes of all answers that are kept for clients who asked for that."""
    max_kept_bytes_of_key: int = 16 * 1024 * 1024
    """Those of one key; then its oldest go."""
    save_usage_s: float = 10.0
    """Minimum time between two writes of the keys' usage to its file."""
    database_busy_s: float = 2.0
    """Time that a call waits for a locked SQLite database; then it is a 503."""
    max_database_calls: int = 64
    """Calls of the sessions' database that run or wait; further ones are refused (503)."""
    max_database_calls_of_key: int = 16
    """Those of one key; further ones get 429."""
    max_mcp_calls: int = 32
    """Requests for MCP servers' tools, and calls of these, that run; further ones get 503."""
    max_mcp_calls_of_key: int = 4
    """Those of one key; further ones get 429."""
    max_mcp_bytes: int = 1024 * 1024
    """Bytes of an answer of an MCP server."""
    mcp_list_s: float = 10.0
    """Time for an MCP server to list its tools."""
    mcp_call_s: float = 60.0
    """Time for a call of an MCP server's tool."""
    retry_load_s: float = 15.0
    """Time for which a model that could not be loaded is not tried again."""


SERVER_LIMITS = ServerLimits()
"""The limits of a server that is not a test's."""
