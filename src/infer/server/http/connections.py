"""`Connections`: who has a place, who gives way when there is none, and what was refused.

One object for all connections of a server. A place is a file descriptor, so their number follows
from the process's limit, which is raised first. When all places are taken, a connection that
nobody uses gives way to a new one: first those whose request was refused, then kept-alive ones
without a request, then those whose first bytes do not come. If all are in use, some more may stay
until their request has been read: a health probe is answered there, everything else gets 503.
"""

from __future__ import annotations

import enum
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Scope

from infer.errors import ConfigError

log = logging.getLogger("infer.server")

KEY = "infer.connections"
"""in a scope: the `Connections` of the server"""
PROBE_PATHS = frozenset({"/health", "/health/live", "/health/ready"})
MAX_CONNECTIONS = 1024
PROBE_PLACES = 8
"""beside the others: for health probes when all places are in use"""
ACCEPTED_AT_ONCE = 16
"""by the event loop in one turn: so many are open before any of them is counted"""
SILENT_S = 1.0
"""a connection that has not sent a whole head for so long gives way to a new one"""
SILENT_PROBE_S = 0.1
"""the same for one in the places for probes, which ask at once"""
_TURNS_UNTIL_CLOSED = 4
"""from `accept` to the descriptor's end of a connection that is refused at once"""
_RESERVED_DESCRIPTORS = 16
"""for another engine process, the sessions, the file of keys"""
_MIN_PLACES = 4
_LOG_EVERY_S = 1.0
"""for each reason; what comes between is counted in the next line"""


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections may be open."""

    places: int = MAX_CONNECTIONS
    probe_places: int = PROBE_PLACES
    accepted_at_once: int = ACCEPTED_AT_ONCE


def _num_open_descriptors() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return 64


def connection_limits() -> ConnectionLimits:
    """Raise the soft limit of file descriptors where that is needed and allowed; what it leaves
    room for. Raises `ConfigError` if that is next to nothing."""
    used = _num_open_descriptors() + _RESERVED_DESCRIPTORS
    whole = ConnectionLimits()
    more = whole.probe_places + _TURNS_UNTIL_CLOSED * whole.accepted_at_once
    limit = _raised_descriptor_limit(used + whole.places + more)
    if limit >= used + whole.places + more:
        return whole
    few = min(ACCEPTED_AT_ONCE, max(1, (limit - used) // 16))
    places = limit - used - PROBE_PLACES - _TURNS_UNTIL_CLOSED * few
    if places < _MIN_PLACES:
        message = f"the limit of {limit} file descriptors leaves no room for connections"
        raise ConfigError("host", f"{message}; raise it (ulimit -n {used + 64}, or more)")
    log.warning("%d connections at most: the limit of file descriptors is %d", places, limit)
    return ConnectionLimits(places, PROBE_PLACES, few)


def _raised_descriptor_limit(wanted: int) -> int:
    try:
        import resource
    except ImportError:  # not a Unix: sockets are no descriptors there
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


class Use(enum.Enum):
    """What a connection is doing; members are in the order in which they give way."""

    REFUSED = enum.auto()
    """it has its last answer and is given time to read it"""
    IDLE = enum.auto()
    """kept alive: nothing has come since the last answer"""
    HEAD = enum.auto()
    """a request line and headers are expected, or come"""
    REQUEST = enum.auto()
    """a request is read or answered"""


class Connection(Protocol):
    """What `Connections` asks of one."""

    def give_way(self) -> None:
        """Close now."""


@dataclass
class Refusals:
    """Counts what was refused before it reached an endpoint, and says so in the log."""

    counts: Counter[str] = field(default_factory=Counter)
    clock: Callable[[], float] = time.monotonic
    _logged_s: dict[str, float] = field(default_factory=dict)
    _unlogged: Counter[str] = field(default_factory=Counter)

    def note(self, reason: str, client: tuple[str, int] | None) -> None:
        """`reason` is a short word of ours. At most one line a second for each reason."""
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
    """Connections by what they do, each in the order in which they began to."""

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
        """Add it, or note that it does something else now."""
        if self._uses.get(connection) is not use:
            self.remove(connection)
            self._uses[connection] = use
            self._by_use[use][connection] = self._clock()

    def remove(self, connection: Connection) -> None:
        """Forget it, if it is here."""
        use = self._uses.pop(connection, None)
        if use is not None:
            del self._by_use[use][connection]

    def make_room(self) -> bool:
        """Close the one that is needed least; False if each of them is in use."""
        for use in (Use.REFUSED, Use.IDLE, Use.HEAD):
            for connection, since_s in self._by_use[use].items():
                if use is Use.HEAD and self._clock() - since_s < self._silent_s:
                    break
                self.remove(connection)
                connection.give_way()
                return True
        return False


class Connections:
    """See the module's docstring."""

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self.refusals = Refusals(clock=clock)
        self.num_gave_way = 0
        self._placed = _Group(SILENT_S, clock)
        self._others = _Group(SILENT_PROBE_S, clock)

    @property
    def num_open(self) -> int:
        """All of them, those without a place included."""
        return len(self._placed) + len(self._others)

    def add(self, connection: Connection) -> bool:
        """One has been accepted; False = it must be closed."""
        if self._has_room(self._placed, self.limits.places):
            self._placed.put(connection, Use.HEAD)
        elif self._has_room(self._others, self.limits.probe_places):
            self._others.put(connection, Use.HEAD)
        else:
            return False
        return True

    def admit(self, connection: Connection) -> bool:
        """Whether its request may be worked on: it has a place, or there is one for it now."""
        if connection in self._others and self._has_room(self._placed, self.limits.places):
            self._others.remove(connection)
            self._placed.put(connection, Use.REQUEST)
        return connection in self._placed

    def note(self, connection: Connection, use: Use) -> None:
        """It does something else now."""
        for group in (self._placed, self._others):
            if connection in group:
                group.put(connection, use)

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        self._placed.remove(connection)
        self._others.remove(connection)

    def _has_room(self, group: _Group, places: int) -> bool:
        if len(group) < places:
            return True
        if not group.make_room():
            return False
        self.num_gave_way += 1
        return True


def connections_of(scope: Scope) -> Connections:
    """Those of the server that a request came to; without one (tests), of its own."""
    if KEY not in scope:
        scope[KEY] = Connections()
    connections = scope[KEY]
    assert isinstance(connections, Connections)
    return connections


def note_refusal(scope: Scope, reason: str) -> None:
    """A request was refused for how it came, not for what it asks."""
    connections_of(scope).refusals.note(reason, scope.get("client"))
