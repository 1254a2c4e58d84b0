"""Engines behind links, without Ray: hash engines in a thread, and carriers within this process.

`LinkedEngine` is one machine with its `EngineHost`; `Wire` carries the items to one front.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from infer.replicas.engine_host import EngineHost
from infer.replicas.link_messages import Description
from infer.replicas.remote_member import LinkBrokenError, RemoteMember
from tests.support.fleet_members import HashMember


class LinkedEngine:
    """An engine that computes in a thread of its own, and the host of its links."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.lock = threading.RLock()
        """held by whoever touches the engine"""
        self.engine = HashMember(name, **settings)
        self.host = EngineHost(self.engine)
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

    def description(self) -> Description:
        name, limits = self.engine.name, self.engine.limits
        return Description(name, "hash-model", limits, self.engine.fingerprint, False)

    def die(self, *, from_outside: bool = True) -> None:
        """The engine's process dies, and another one follows."""
        with self.lock:
            self.engine.die(from_outside=from_outside)
            self.engine.revive()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


class Wire:
    """A `Carrier` between a front and a `LinkedEngine`."""

    def __init__(self, machine: LinkedEngine, front: str) -> None:
        self.machine, self.front = machine, front
        self.is_slow = False
        """whether nothing is read"""
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

    def send(self, item: bytes) -> None:
        if self.machine.has_gone:
            raise LinkBrokenError("the machine has gone", is_final=True)
        with self.machine.lock:
            self.machine.host.command(self.front, item)

    def close(self) -> None:
        self._is_closed = True
        self._arrived.set()


def remote(machine: LinkedEngine, front: str) -> RemoteMember:
    """A machine as a member of a front's fleet."""
    return RemoteMember(machine.description(), Wire(machine, front))


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    """Wait for something that happens soon."""
    ends_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_s, "it does not happen"
        time.sleep(0.005)
