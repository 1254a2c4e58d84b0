"""`FairQueue`: work of many owners that waits for a few places, each owner's in its turn."""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """The first waiting item of each owner starts in turn, and one owner never has all places. So
    an owner with many items waits only for its own. It is a plain data structure without threads or
    locks; `server.http.fair_threads`, `server.comparisons`, `text.untrusted.workers` and
    `runner.compiling_threads` use it."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._waiting: dict[str, deque[T]] = {}
        """Waiting items by owner; the owner whose turn is next comes first."""
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of items that wait."""
        return sum(map(len, self._waiting.values()))

    def num_open(self, owner: str) -> int:
        """Number of items of an owner that wait or run."""
        return len(self._waiting.get(owner, ())) + self._running[owner]

    def put(self, owner: str, item: T) -> None:
        """Add an item behind those of the same owner. Items of the owner "" (there are no keys) may
        have all places."""
        self._waiting.setdefault(owner, deque()).append(item)

    def remove(self, owner: str, item: T) -> None:
        """Remove an item, if it waits."""
        items = self._waiting.get(owner, deque())
        if item in items:
            items.remove(item)
        if not items:
            self._waiting.pop(owner, None)

    def take(self) -> tuple[str, T] | None:
        """(owner, item) of the next item that may start, which has a place until `done`; None: all
        places are taken, or nobody may start."""
        if self._running.total() >= self._num_places:
            return None
        owner = next(filter(self._may_start, self._waiting), None)
        if owner is None:
            return None
        items = self._waiting.pop(owner)
        item = items.popleft()
        if items:
            self._waiting[owner] = items  # after all other owners
        self._running[owner] += 1
        return owner, item

    def done(self, owner: str) -> None:
        """Free the place of an item of this owner."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]

    def drain(self) -> list[T]:
        """Remove all items that wait, and return them."""
        items = [item for waiting in self._waiting.values() for item in waiting]
        self._waiting.clear()
        return items

    def _may_start(self, owner: str) -> bool:
        most = self._num_places - 1 if owner else self._num_places
        return self._running[owner] < max(1, most)
