"""`CommandOrder`: Ray's calls of an actor as one ordered stream; nothing here imports Ray

They may come in another order than they were made. What goes to a front is one streaming call:
`replicas.socket_link.link_items`.
"""

from __future__ import annotations

import threading
import time

MISSING_S = 3.0
"""Seconds for which commands wait for an earlier one before their link is dropped."""
ITEM_S = 0.02
"""Seconds from an item of a link to the next one: short steps share an item, for Ray takes some
milliseconds of CPU for each. Where steps take longer, nothing waits."""


class CommandOrder:
    """Puts the commands of fronts in order, where what carries them keeps none.

    A front numbers its links, and its commands on each link from 0. A command that never comes is
    noticed by those behind it, for a living front gives a sign every `HEARTBEAT_S`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fronts: dict[str, _Arrivals] = {}

    def arrived(self, front: str, link: int, number: int, item: bytes) -> list[bytes]:
        """The commands that may be obeyed now that this one has come."""
        with self._lock:
            arrivals = self._fronts.get(front)
            if arrivals is None or arrivals.link < link:
                arrivals = self._fronts[front] = _Arrivals(link)
            return arrivals.add(number, item) if arrivals.link == link else []

    def incomplete(self) -> list[str]:
        """The fronts of which a command is missing for `MISSING_S`; each is named once."""
        with self._lock:
            late = [name for name, arrivals in self._fronts.items() if arrivals.is_incomplete]
            for front in late:
                del self._fronts[front]
            return late

    def forget(self, front: str, link: int) -> None:
        """A link has ended."""
        with self._lock:
            arrivals = self._fronts.get(front)
            if arrivals is not None and arrivals.link == link:
                del self._fronts[front]


class _Arrivals:
    """What has come on the latest link of a front."""

    def __init__(self, link: int) -> None:
        self.link = link
        self._next_number = 0
        self._early: dict[int, bytes] = {}
        """Commands that have come before an earlier one."""
        self._complete_s = time.monotonic()
        """When a command could be obeyed for the last time."""

    def add(self, number: int, item: bytes) -> list[bytes]:
        """See `CommandOrder.arrived`."""
        self._early[number] = item
        ready = []
        while (early := self._early.pop(self._next_number, None)) is not None:
            ready.append(early)
            self._next_number += 1
        if ready:
            self._complete_s = time.monotonic()
        return ready

    @property
    def is_incomplete(self) -> bool:
        """See `CommandOrder.incomplete`."""
        return bool(self._early) and time.monotonic() - self._complete_s > MISSING_S
