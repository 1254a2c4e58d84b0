"""`LimitAuthority`: the buckets and open requests of all keys, for all fronts of a cluster

One exists in a cluster; `tenancy.front_limits` is the other side. It has no state on a disk. A new
one does not decide until all fronts have told it what is missing in their shares, or `GRACE_S` is
over; so the death of an authority fills no bucket.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from infer.server.tenancy.limit_messages import (
    BucketLevel,
    Exchange,
    LimitAnswer,
    LimitAsk,
    LimitVerdict,
)
from infer.server.tenancy.token_bucket import Bucket

GRACE_S = 1.0
"""seconds for which a new authority waits for fronts that it has not heard of"""
SILENT_S = 3.0
"""seconds of silence after which a front's open requests count no more"""
FORGET_S = 60.0
"""seconds of silence after which a front is forgotten"""
_PURGE_EVERY = 1024
"""exchanges between two searches for full buckets and silent fronts, which are dropped"""

_Place = tuple[str, str]
"""key id and name of a bucket"""


@dataclass
class _Front:
    """What is known about a front."""

    number: int = 0
    """number of its latest exchange"""
    heard_s: float = 0.0
    num_open: dict[str, int] = field(default_factory=dict)
    unconfirmed: list[tuple[_Place, float]] = field(default_factory=list)
    """what its latest exchange has taken from buckets"""


@dataclass
class _Entry:
    """A bucket, and the number of the change after which it was as it is."""

    bucket: Bucket
    version: int


class LimitAuthority:
    """See the module's docstring. `exchange` may be called by one thread at a time."""

    def __init__(self, num_fronts: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_fronts`: fronts that there are to be."""
        self._incarnation = secrets.token_hex(8)
        self._num_fronts = num_fronts
        self._clock = clock
        self._opens_s = clock() + GRACE_S
        self._is_open = False
        self._fronts: dict[str, _Front] = {}
        self._entries: dict[_Place, _Entry] = {}
        """the latest changed one is the last"""
        self._version = 0
        self._num_exchanges = 0

    def exchange(self, said: Exchange) -> LimitAnswer:
        """Take what a front says, and decide what it asks for."""
        now_s = self._clock()
        if said.incarnation != self._incarnation:
            return LimitAnswer(self._incarnation, said.number)
        front = self._fronts.setdefault(said.front, _Front())
        if said.number <= front.number:  # an old one that has come late
            return LimitAnswer(self._incarnation, said.number)
        self._num_exchanges += 1
        if self._num_exchanges % _PURGE_EVERY == 0:
            self._purge(now_s)
        if said.confirmed < front.number:  # its latest answer was lost: the front has used nothing
            for place, amount in front.unconfirmed:
                self._take(place, None, -amount)
        front.unconfirmed = []
        front.number, front.heard_s, front.num_open = said.number, now_s, dict(said.num_open)
        for change in said.changes:
            place = (change.key, change.bucket)
            self._take(place, change.per_minute, change.amount)
            front.unconfirmed.append((place, change.amount))
        self._is_open |= now_s >= self._opens_s or len(self._fronts) >= self._num_fronts
        verdicts = [self._decide(front, ask, now_s) for ask in said.asks] if self._is_open else []
        return LimitAnswer(
            self._incarnation,
            said.number,
            self._version,
            self._is_open,
            verdicts,
            self._levels(said.version),
        )

    def _decide(self, front: _Front, ask: LimitAsk, now_s: float) -> LimitVerdict:
        place = (ask.key, ask.bucket)
        bucket = self._bucket(place, ask.per_minute) if ask.bucket else None
        level = bucket.level() if bucket else 0.0
        if ask.places and self._num_open(ask.key, now_s) + ask.places > ask.max_open:
            return LimitVerdict(False, has_no_place=True, level=level)
        if bucket is not None:
            if wait_s := bucket.wait_s(ask.amount):
                return LimitVerdict(False, level=level, wait_s=wait_s)
            self._take(place, ask.per_minute, ask.amount)
            front.unconfirmed.append((place, ask.amount))
            level = bucket.level()
        if ask.places:
            front.num_open[ask.key] = front.num_open.get(ask.key, 0) + ask.places
        return LimitVerdict(True, level=level)

    def _num_open(self, key: str, now_s: float) -> int:
        return sum(
            front.num_open.get(key, 0)
            for front in self._fronts.values()
            if now_s - front.heard_s < SILENT_S
        )

    def _bucket(self, place: _Place, per_minute: int | None) -> Bucket | None:
        """The bucket; made full if there is none, of the size that was said last."""
        entry = self._entries.get(place)
        if entry is None:
            if per_minute is None:
                return None  # it was full, and is dropped
            self._version += 1
            bucket = Bucket(per_minute, self._clock)
            entry = self._entries[place] = _Entry(bucket, self._version)
        elif per_minute is not None and per_minute != entry.bucket.size:
            entry.bucket.resize(per_minute)  # the operator has changed the key
        return entry.bucket

    def _take(self, place: _Place, per_minute: int | None, amount: float) -> None:
        bucket = self._bucket(place, per_minute)
        if bucket is None:
            return
        bucket.take(amount)
        self._version += 1
        self._entries.pop(place)
        self._entries[place] = _Entry(bucket, self._version)

    def _levels(self, version: int) -> list[BucketLevel]:
        found = []
        for (key, name), entry in reversed(self._entries.items()):
            if entry.version <= version:
                break
            bucket = entry.bucket
            found.append(BucketLevel(key, name, int(bucket.size), bucket.level()))
        return found

    def _purge(self, now_s: float) -> None:
        self._entries = {
            place: entry
            for place, entry in self._entries.items()
            if entry.bucket.level() < entry.bucket.size
        }
        self._fronts = {
            name: front for name, front in self._fronts.items() if now_s - front.heard_s < FORGET_S
        }
