"""`Connections`: the open connections, and which is closed when a new one needs its place"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from infer.errors import ConfigError
from infer.types.server_limits import DEFAULT_CONNECTIONS, MIN_CONNECTIONS, SERVER_LIMITS

if TYPE_CHECKING:
    from starlette.types import Scope

log = logging.getLogger("infer.server")

KEY = "infer.connections"
"""Key of the server's `Connections` in an ASGI scope."""
PROBE_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
"""Paths that are answered when all places are in use."""
ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts in one iteration, before any of them is counted."""
SILENT_S = 1.0
"""Seconds without complete headers after which a connection may be closed for a new one."""
SILENT_PROBE_S = 0.1
"""The same for the places for probes, whose clients send at once."""
_TURNS_UNTIL_CLOSED = 4
"""Event loop iterations from `accept` to the closed descriptor of a connection refused at once."""
_RESERVED_DESCRIPTORS = 16
"""File descriptors kept free for another engine process, the sessions and the file of keys."""
_LOG_EVERY_S = 1.0
"""Minimum seconds between two log lines for one reason; the later line counts those in between."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Numbers of connections that may be open."""

    places: int = DEFAULT_CONNECTIONS
    """Connections of any kind."""
    probe_places: int = SERVER_LIMITS.probe_connections
    """Additional connections, for health probes."""
    accepted_at_once: int = ACCEPTED_AT_ONCE
    """Connections accepted in one iteration of the event loop (the listening socket's backlog)."""


class Descriptors:
    """The file descriptors of this process."""

    def num_open(self) -> int:
        """The number of open ones."""
        for folder in ("/proc/self/fd", "/dev/fd"):
            try:
                return len(os.listdir(folder))
            except OSError:
                continue
        return 64

    def raise_limit(self, wanted: int) -> int:
        """The limit, after it was raised to `wanted` or as near to it as is allowed."""
        try:
            import resource
        except ImportError:  # not Unix: sockets are not file descriptors there
            return wanted
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return wanted
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        except (OSError, ValueError):
            return soft
        return raised


def connection_limits(
    whole: ConnectionLimits | None = None, descriptors: Descriptors | None = None
) -> ConnectionLimits:
    """`whole`, or as much of it as the process may have file descriptors for, whose soft limit is
    raised if that is needed and allowed. Raises `ConfigError` if fewer than
    `MIN_CONNECTIONS` remain.
    """
    whole, descriptors = whole or ConnectionLimits(), descriptors or Descriptors()
    used = descriptors.num_open() + _RESERVED_DESCRIPTORS
    more = whole.probe_places + _TURNS_UNTIL_CLOSED * whole.accepted_at_once
    needed = used + whole.places + more
    limit = descriptors.raise_limit(needed)
    if limit >= needed:
        return whole
    few = min(ACCEPTED_AT_ONCE, max(1, (limit - used) // 16))
    places = limit - used - whole.probe_places - _TURNS_UNTIL_CLOSED * few
    if places < MIN_CONNECTIONS:
        message = f"the limit of {limit} file descriptors leaves no room for connections"
        raise ConfigError("host", f"{message}; raise it (ulimit -n {used + 64}, or more)")
    log.warning(
        "%d connections at most, and not %d (--max-connections): the limit of file descriptors is"
        " %d, and %d are needed (ulimit -n, LimitNOFILE of systemd)",
        *(places, whole.places, limit, needed),
    )
    return ConnectionLimits(places, whole.probe_places, few)


def early_limits(
    whole: ConnectionLimits, descriptors: Descriptors | None = None
) -> ConnectionLimits:
    """`whole`, or half of the descriptors that this process may still have: for connections while
    the rest of the server is being made. Logs and refuses nothing."""
    descriptors = descriptors or Descriptors()
    used = descriptors.num_open() + _RESERVED_DESCRIPTORS
    more = whole.probe_places + whole.accepted_at_once
    limit = descriptors.raise_limit(used + 2 * (whole.places + more))
    places = max(MIN_CONNECTIONS, min(whole.places, (limit - used) // 2 - more))
    return ConnectionLimits(places, whole.probe_places, whole.accepted_at_once)


class Use(enum.Enum):
    """State of a connection; connections are closed for others in the order of the members."""

    REFUSED = enum.auto()
    """Its last answer was sent; it stays open for a while so that the client can read it."""
    IDLE = enum.auto()
    """Kept alive; nothing was received since the last answer."""
    HANDSHAKE = enum.auto()
    """TLS: the handshake is not finished."""
    HEAD = enum.auto()
    """Waiting for a request line and headers, or reading them."""
    REQUEST = enum.auto()
    """Reading or answering a request."""


class Connection(Protocol):
    """The interface of a connection for `Connections`."""

    def give_way(self) -> None:
        """Close now, because another connection needs the place."""


@dataclass
class Refusals:
    """Counts and logs what was refused before it reached an endpoint."""

    counts: Counter[str] = field(default_factory=Counter)
    clock: Callable[[], float] = time.monotonic
    _logged_s: dict[str, float] = field(default_factory=dict)
    _unlogged: Counter[str] = field(default_factory=Counter)

    def note(self, reason: str, client: tuple[str, int] | None) -> None:
        """Count a refusal; log it if the last line for this reason is a second old.

        `reason`: a short name of the reason, as in `/metrics`. `client`: address and port.
        """
        self.counts[reason] += 1
        now_s = self.clock()
        if now_s - self._logged_s.get(reason, -_LOG_EVERY_S) < _LOG_EVERY_S:
            self._unlogged[reason] += 1
            return
        self._logged_s[reason] = now_s
        more = self._unlogged.pop(reason, 0)
        address = f"{client[0]}:{client[1]}" if client else "unknown"
        fields = {"client": address, "reason": reason, "unlogged": more}
        also = f" ({more} more since the last such line)" if more else ""
        log.warning("refused %s: %s%s", address, reason, also, extra={"fields": fields})


class _Group:
    """Connections by state, in each state in the order in which they entered it."""

    def __init__(self, silent_s: float, clock: Callable[[], float]) -> None:
        self._silent_s = silent_s
        self._clock = clock
        self._by_use: dict[Use, OrderedDict[Connection, float]] = {u: OrderedDict() for u in Use}
        self._uses: dict[Connection, Use] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._uses

    def put(self, connection: Connection, use: Use) -> None:
        """Add a connection, or change its state."""
        if self._uses.get(connection) is not use:
            self.remove(connection)
            self._uses[connection] = use
            self._by_use[use][connection] = self._clock()

    def remove(self, connection: Connection) -> None:
        """Remove a connection, if it is in the group."""
        use = self._uses.pop(connection, None)
        if use is not None:
            del self._by_use[use][connection]

    def close_idle(self) -> None:
        """Close the kept connections without a request."""
        for connection in list(self._by_use[Use.IDLE]):
            self.remove(connection)
            connection.give_way()

    def make_room(self) -> bool:
        """Close the connection that is needed least; returns False if all are in use."""
        for use in (Use.REFUSED, Use.IDLE, Use.HANDSHAKE, Use.HEAD):
            for connection, since_s in self._by_use[use].items():
                is_young = use in (Use.HANDSHAKE, Use.HEAD)
                if is_young and self._clock() - since_s < self._silent_s:
                    break
                self.remove(connection)
                connection.give_way()
                return True
        return False


class Connections:
    """One object counts all connections of a server. A place is a file descriptor, so the number of
    places follows from the process's limit, which is raised first. When all places are taken, an
    unused connection is closed for a new one: first those whose request was refused, then
    kept-alive ones without a request, then those that do not finish their TLS handshake, then those
    that send nothing after being opened. If all are in use, a few more connections are accepted
    until their request has been read: a health probe is answered, any other request gets 503."""

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self.refusals = Refusals(clock=clock)
        self.num_gave_way = 0
        self._is_leaving = False
        self._placed = _Group(SILENT_S, clock)
        self._for_probes = _Group(SILENT_PROBE_S, clock)

    @property
    def num_open(self) -> int:
        """Number of open connections, those in the places for probes included."""
        return len(self._placed) + len(self._for_probes)

    @property
    def is_leaving(self) -> bool:
        """Whether the server will end, so each answer is the last of its connection."""
        return self._is_leaving

    def leave(self) -> None:
        """Say that the server will end."""
        self._is_leaving = True

    def add(self, connection: Connection, use: Use = Use.HEAD) -> bool:
        """Count an accepted connection; returns False if it must be closed."""
        if self._find_place(self._placed, self.limits.places):
            self._placed.put(connection, use)
        elif self._find_place(self._for_probes, self.limits.probe_places):
            self._for_probes.put(connection, use)
        else:
            return False
        return True

    def close_idle(self) -> None:
        """Close the kept connections without a request."""
        for group in (self._placed, self._for_probes):
            group.close_idle()

    def hand_over(self, handshake: Connection, connection: Connection) -> None:
        """Let the connection above a finished TLS handshake have its place."""
        for group in (self._placed, self._for_probes):
            if handshake in group:
                group.remove(handshake)
                group.put(connection, Use.HEAD)

    def admit(self, connection: Connection) -> bool:
        """Whether a connection's request may be processed: it has a place, or gets one now."""
        if connection in self._for_probes and self._find_place(self._placed, self.limits.places):
            self._for_probes.remove(connection)
            self._placed.put(connection, Use.REQUEST)
        return connection in self._placed

    def note(self, connection: Connection, use: Use) -> None:
        """Change the state of a connection."""
        for group in (self._placed, self._for_probes):
            if connection in group:
                group.put(connection, use)

    def remove(self, connection: Connection) -> None:
        """Stop counting a connection that is closed."""
        self._placed.remove(connection)
        self._for_probes.remove(connection)

    def _find_place(self, group: _Group, places: int) -> bool:
        if len(group) < places:
            return True
        if not group.make_room():
            return False
        self.num_gave_way += 1
        return True


def connections_of(scope: Scope) -> Connections:
    """The `Connections` of the server that received a request; a new one if there is no server
    (in tests)."""
    if KEY not in scope:
        scope[KEY] = Connections()
    connections = scope[KEY]
    assert isinstance(connections, Connections)
    return connections


def note_refusal(scope: Scope, reason: str) -> None:
    """Count a request that was refused because of its transport, not its content."""
    connections_of(scope).refusals.note(reason, scope.get("client"))
