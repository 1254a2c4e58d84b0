"""`KeyPlaces`: places that all keys share, of which each key may have some and always one

A key that has `max_of_key` gets no more (429). All keys together have `max_of_all`; beyond them a
key that has none still gets one, so no number of other keys can take everything. What is not of a
key (owner "") has no limit but the second.
"""

from __future__ import annotations

from collections import Counter

from infer.server.http.error_responses import too_many


class KeyPlaces:
    """See the module's docstring. `acquire` is a count; what waits for what is the caller's."""

    def __init__(self, what: str, max_of_key: int, max_of_all: int) -> None:
        """`what`: the plural of what has a place, for messages."""
        self._what = what
        self._max_of_key = max_of_key
        self._max_of_all = max_of_all
        self._taken: Counter[str] = Counter()

    def num_of(self, owner: str) -> int:
        """Number of places that an owner has."""
        return self._taken[owner]

    def has_room(self, owner: str, max_of_key: int | None = None) -> bool:
        """Whether an owner may have one more; False: all places are taken.

        `max_of_key`: a smaller limit of this key. Raises `HttpError` (429) if the key has as many
        as it may have.
        """
        own = self._taken[owner]
        most = min(self._max_of_key, max_of_key or self._max_of_key)
        if owner and own >= most:
            raise too_many(f"this key may have {most} {self._what}", 1)
        return bool(owner and not own) or self._taken.total() < self._max_of_all

    def acquire(self, owner: str) -> None:
        """Count a place; what has begun may have it without asking."""
        self._taken[owner] += 1

    def release(self, owner: str) -> None:
        """Free a place."""
        self._taken[owner] -= 1
        if not self._taken[owner]:
            del self._taken[owner]
