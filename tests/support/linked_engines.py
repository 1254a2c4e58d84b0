"""Engines behind links, without Ray: hash engines in a thread, and links within this process.

`LinkedEngine` is one machine with its `ReplicaHost`; `Wire` carries the bytes to one front.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from infer.replicas.host import ReplicaHost
from infer.replicas.link_transport import LinkBrokenError, LinkTransport
from infer.replicas.replica import Replica
from tests.support.fleet_replicas import HashReplica


class LinkedEngine:
    """An engine that computes in a thread of its own, and the host of its links."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.lock = threading.RLock()
        """Held by whoever touches the engine."""
        self.engine = HashReplica(name, **settings)
        self.host = ReplicaHost(self.engine)
        self.is_frozen = self.has_gone = False
        self.engine.start(self.host)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        beats = 0
        while not self._stopped.wait(0.001):
            if self.is_frozen or self.has_gone:
                continue
            beats += 1
            with self.lock:
                self.engine.step()
                if beats % 100 == 0:
                    self.host.heartbeat()

    def die(self, *, from_outside: bool = True) -> None:
        """The engine's process dies, and another one follows."""
        with self.lock:
            self.engine.die(from_outside=from_outside)
            self.engine.revive()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class Wire:
    """A `Link` between a front and a `LinkedEngine`."""

    def __init__(self, machine: LinkedEngine, front: str) -> None:
        self.machine, self.front = machine, front
        self.is_slow = False
        """Whether nothing is read."""
        self.num_links = 0
        self._is_closed = False
        self._arrived = threading.Event()

    def connect(self) -> Iterator[bytes]:
        if self.machine.has_gone:
            raise LinkBrokenError("the machine has gone", is_final=True)
        with self.machine.lock:
            link = self.machine.host.attach(self.front, self._arrived.set)
        self.num_links += 1
        while not self._is_closed:
            if self.machine.has_gone:
                raise LinkBrokenError("the machine has gone", is_final=True)
            self._arrived.clear()
            frozen = self.is_slow or self.machine.is_frozen
            if not frozen and (item := link.take()) is not None:
                yield item
            elif link.is_closed:
                return
            else:
                self._arrived.wait(0.005)

    def offset_s(self) -> float:
        return 0.0

    def send(self, frames: bytes) -> None:
        if self.machine.has_gone:
            raise LinkBrokenError("the machine has gone", is_final=True)
        with self.machine.lock:
            self.machine.host.command(self.front, frames)

    def close(self) -> None:
        self._is_closed = True
        self._arrived.set()


def remote(machine: LinkedEngine, front: str) -> Replica:
    """A machine as a replica of a front's fleet."""
    return over(Wire(machine, front))


def over(wire: Wire) -> Replica:
    """A machine at the end of a wire."""
    name, limits = wire.machine.engine.name, wire.machine.engine.limits
    return Replica(name, limits, LinkTransport(wire, name))
