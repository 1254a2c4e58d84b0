"""`KeyPlaces`: places that all keys share, of which each key may have some and always one"""

from __future__ import annotations

from collections import Counter

from infer.server.http.error_responses import too_many


class KeyPlaces:
    """A key that has `max_of_key` gets no more (429). All keys together have `max_of_all`; beyond
    them a key that has none still gets one, so no number of other keys can take everything. What is
    not of a key (owner "") has no limit but the second. `acquire` is a count; what waits for what
    is the caller's."""

    def __init__(self, what: str, max_of_key: int, max_of_all: int) -> None:
        """`what`: the plural of what has a place, for messages."""
        self._what = what
        self._max_of_key = max_of_key
        self._max_of_all = max_of_all
        self._taken: Counter[str] = Counter()

    def num_of(self, owner: str) -> int:
        """Number of places that an owner has."""
        return self._taken[owner]

    def has_room(self, owner: str, max_of_key: int | None = None, *, num_wanted: int = 1) -> bool:
        """Whether an owner may have `num_wanted` more; False: too few are left.

        `max_of_key`: a smaller limit of this key. Raises `HttpError` (429) if the key would have
        more than it may have.
        """
        num_taken = self._taken.get(owner, 0)
        most = min(self._max_of_key, max_of_key or self._max_of_key)
        if owner and num_taken and num_taken + num_wanted > most:
            raise too_many(f"this key may have {most} {self._what}", 1)
        return bool(owner and not num_taken) or self._taken.total() + num_wanted <= self._max_of_all

    def acquire(self, owner: str, num_places: int = 1) -> None:
        """Count places; what has begun may have them without asking."""
        self._taken[owner] += num_places

    def release(self, owner: str, num_places: int = 1) -> None:
        """Free places."""
        self._taken[owner] -= num_places
        if not self._taken[owner]:
            del self._taken[owner]
