"""`FrontPlace`: where one of several fronts listens; `FrontProcess`: its process, from outside

See `server.front_keeper`, which uses both.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from infer.replicas.spawned import start_module
from infer.server.address import join
from infer.server.early_listener import EarlyListener
from infer.server.front_identity import new_front_name
from infer.server.front_messages import (
    FromFront,
    FrontBegin,
    FrontSettings,
    FrontSignal,
    FrontStream,
    ToFront,
    decode_from_front,
)
from infer.server.settings import ServerSettings

MODULE = "infer.server.front_process"


class FrontProcess:
    """The process of a front, and this side of its sockets. Lives on an event loop, from `begin` to
    `close`."""

    def __init__(
        self, sock: socket.socket, probes: socket.socket | None, num_links: int, module: str
    ) -> None:
        """`sock` and `probes`: where it will listen. `module`: what it runs."""
        self.name = new_front_name()
        pairs = [socket.socketpair() for _ in range(2 + num_links)]
        (self._control, self._handing, *links), theirs = zip(*pairs, strict=True)
        self.links: list[socket.socket] = links
        """For each engine."""
        control, handed, *numbers = [end.fileno() for end in theirs]
        probing = -1 if probes is None else probes.fileno()
        numbers = [os.getpid(), control, handed, sock.fileno(), probing, *numbers]
        passed = [number for number in numbers[1:] if number >= 0]
        self.popen = start_module(module, *map(str, numbers), pass_fds=passed)
        for end in theirs:
            end.close()
        for end in (self._control, self._handing, *links):
            end.setblocking(False)
        self._stream: FrontStream[FromFront] | None = None
        self._told = ""
        self._heard_s = self._served_from_s = 0.0
        self.is_prepared = self.is_serving = False
        """Whether it could listen, and whether it does."""
        self.num_open = 0
        """Requests that it has said that it has."""

    async def begin(self, first: FrontBegin) -> FrontStream[FromFront]:
        """Tell it what it is; what it says comes from what is returned."""
        self._heard_s, self._told = time.monotonic(), first.settings
        self._stream = await FrontStream.over(self._control, decode_from_front)
        self._stream.send(first)
        return self._stream

    def send(self, message: ToFront) -> None:
        """Tell it something, from `begin` to `close`."""
        if self._stream is not None:
            self._stream.send(message)

    def settle(self, settings: str, others: list[str], *, always: bool) -> None:
        """Have it take these settings if it has others, or `always`; see `FrontSettings`."""
        if self.is_prepared and (always or settings != self._told):
            self._told = settings
            self.send(FrontSettings(settings, others))

    def signal(self, number: int) -> None:
        """Have it do what a signal asks a server for; it ends at once if it does not serve."""
        if self.is_serving:
            self.send(FrontSignal(number))
        else:
            self.popen.kill()

    def hand(self, kind: bytes, connection: socket.socket) -> bool:
        """Give it a connection; False where it does not take one now."""
        try:
            socket.send_fds(self._handing, [kind], [connection.fileno()])
        except OSError:
            return False
        return True

    # ---- what it has said

    def prepared(self) -> None:
        """It could listen."""
        self.is_prepared, self._heard_s = True, time.monotonic()

    def serves(self) -> None:
        """It listens."""
        self.is_serving = True
        self._heard_s = self._served_from_s = time.monotonic()

    def alive(self, num_open: int) -> None:
        """It lives, with so many requests."""
        self.num_open, self._heard_s = num_open, time.monotonic()

    def excuse(self) -> None:
        """It could give no sign until now."""
        self._heard_s = time.monotonic()

    @property
    def silence_s(self) -> float:
        """Seconds since it has given a sign; 0 before `begin`."""
        return time.monotonic() - self._heard_s if self._heard_s else 0.0

    @property
    def served_s(self) -> float:
        """Seconds since it began to serve; 0: it has not."""
        return time.monotonic() - self._served_from_s if self._served_from_s else 0.0

    def close(self) -> None:
        """Hear no more of it. A second call does nothing."""
        self.is_serving = False
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        for sock in (self._control, self._handing, *self.links):
            sock.close()


@dataclass(eq=False)
class FrontPlace:
    """Where one front listens; it stays while processes come and go."""

    sock: socket.socket
    probes: socket.socket | None
    """Of the port for health and metrics, if there is one."""
    num_links: int
    """Of engines."""
    module: str = MODULE
    """What a front runs."""
    front: FrontProcess | None = None
    has_listened: bool = False
    num_failures: int = 0
    """Fronts in a row that have died soon."""
    covered: set[socket.socket] = field(default_factory=set)
    """Its sockets, while connections to them are accepted for others."""

    def start(self) -> FrontProcess:
        """Start a front here; the system ends it with the thread that calls this."""
        self.front = FrontProcess(self.sock, self.probes, self.num_links, self.module)
        return self.front

    @property
    def socks(self) -> set[socket.socket]:
        """All that it listens at."""
        return {sock for sock in (self.sock, self.probes) if sock is not None}

    @property
    def serving(self) -> FrontProcess | None:
        """Its front, if that serves."""
        return self.front if self.front is not None and self.front.is_serving else None


@contextlib.contextmanager
def front_places(
    listener: EarlyListener, settings: ServerSettings, module: str = MODULE
) -> Iterator[list[FrontPlace]]:
    """A place for each front, and a process that imports the server while engines are loaded; the
    first one gets the sockets of `listener`. `module`: what they run. Raises `ConfigError`."""
    with contextlib.ExitStack() as held:
        probes = listener.metrics.sock if listener.metrics else None
        places = [FrontPlace(listener.sock, probes, settings.replicas, module)]
        for _ in range(1, settings.fronts):
            further = functools.partial(
                join, write_stall_s=settings.write_stall_s, limits=settings.limits
            )
            sock = held.enter_context(further(listener.sock))
            probing = held.enter_context(further(probes)) if probes else None
            place = FrontPlace(sock, probing, settings.replicas, module)
            for listening in place.socks:
                listening.setblocking(False)
            places.append(place)
        try:
            for place in places:
                place.start()
            yield places
        finally:
            for place in places:
                if place.front is not None:
                    place.front.popen.kill()
                    place.front.popen.wait()
                    place.front.close()
