"""`LimitAuthority`: the buckets and open requests of all keys, for all fronts of some engines"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from infer.server.tenancy.limit_messages import (
    BucketId,
    BucketLevel,
    LimitAnswer,
    LimitAsk,
    LimitSync,
    LimitVerdict,
)
from infer.server.tenancy.local_limits import decided
from infer.server.tenancy.token_bucket import Bucket

GRACE_S = 1.0
"""Seconds for which a new authority waits for fronts that it has not heard of."""
SILENT_S = 3.0
"""Seconds of silence after which a front's open requests count no more."""
FORGET_S = 60.0
"""Seconds of silence after which a front is forgotten."""
_PURGE_EVERY = 1024
"""Sync messages between two searches for full buckets and silent fronts, which are dropped."""


@dataclass
class _Front:
    """What is known about a front."""

    number: int = 0
    """Number of its latest sync message."""
    heard_s: float = 0.0
    num_open: dict[str, int] = field(default_factory=dict)
    unconfirmed: list[tuple[BucketId, float]] = field(default_factory=list)
    """What its latest sync message has taken from buckets."""


@dataclass
class _Entry:
    """A bucket, and the number of the change after which it was as it is."""

    bucket: Bucket
    version: int


class LimitAuthority:
    """There is one for them; `tenancy.front_limits` is the other side. It has no state on a disk. A
    new one does not decide until all fronts have told it what is missing in their shares, or
    `GRACE_S` is over; so the death of an authority fills no bucket. `sync` may be called by one
    thread at a time."""

    def __init__(self, num_fronts: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_fronts`: fronts that there are to be."""
        self._generation = secrets.token_hex(8)
        self._num_fronts = num_fronts
        self._clock = clock
        self._opens_s = clock() + GRACE_S
        self._is_open = False
        self._fronts: dict[str, _Front] = {}
        self._entries: dict[BucketId, _Entry] = {}
        """The latest changed one is the last."""
        self._version = 0
        self._num_syncs = 0

    def sync(self, said: LimitSync) -> LimitAnswer:
        """Take what a front says, and decide what it asks for."""
        now_s = self._clock()
        if said.generation != self._generation:
            return LimitAnswer(self._generation, said.number)
        front = self._fronts.setdefault(said.front, _Front())
        if said.number <= front.number:  # an old one that has come late
            return LimitAnswer(self._generation, said.number)
        self._num_syncs += 1
        if self._num_syncs % _PURGE_EVERY == 0:
            self._purge(now_s)
        if said.confirmed < front.number:  # its latest answer was lost: the front has used nothing
            for bucket_id, amount in front.unconfirmed:
                self._take(bucket_id, None, -amount)
        front.unconfirmed = []
        front.number, front.heard_s, front.num_open = said.number, now_s, dict(said.num_open)
        for change in said.changes:
            bucket_id = (change.key, change.bucket)
            self._take(bucket_id, change.per_minute, change.amount)
            front.unconfirmed.append((bucket_id, change.amount))
        self._is_open |= now_s >= self._opens_s or len(self._fronts) >= self._num_fronts
        verdicts = [self._decide(front, ask, now_s) for ask in said.asks] if self._is_open else []
        return LimitAnswer(
            self._generation,
            said.number,
            self._version,
            self._is_open,
            verdicts,
            self._levels(said.version),
        )

    def forget(self, front: str) -> None:
        """A front has gone: its open requests count no more."""
        self._fronts.pop(front, None)

    def _decide(self, front: _Front, ask: LimitAsk, now_s: float) -> LimitVerdict:
        bucket_id = (ask.key, ask.bucket)
        bucket = self._bucket(bucket_id, ask.per_minute) if ask.bucket else None
        num_open = self._num_open(ask.key, now_s) if ask.num_opened else 0
        verdict = decided(ask, bucket, num_open, ask.max_open)
        if verdict.is_granted:
            if ask.bucket:
                self._changed(bucket_id)
                front.unconfirmed.append((bucket_id, ask.amount))
            if ask.num_opened:
                front.num_open[ask.key] = front.num_open.get(ask.key, 0) + ask.num_opened
        return verdict

    def _num_open(self, key: str, now_s: float) -> int:
        return sum(
            front.num_open.get(key, 0)
            for front in self._fronts.values()
            if now_s - front.heard_s < SILENT_S
        )

    def _bucket(self, bucket_id: BucketId, per_minute: int | None) -> Bucket | None:
        """The bucket; made full if there is none, of the size that was said last."""
        entry = self._entries.get(bucket_id)
        if entry is None:
            if per_minute is None:
                return None  # it was full, and is dropped
            self._version += 1
            bucket = Bucket(per_minute, self._clock)
            entry = self._entries[bucket_id] = _Entry(bucket, self._version)
        elif per_minute is not None and per_minute != entry.bucket.size:
            entry.bucket.resize(per_minute)  # the operator has changed the key
        return entry.bucket

    def _take(self, bucket_id: BucketId, per_minute: int | None, amount: float) -> None:
        bucket = self._bucket(bucket_id, per_minute)
        if bucket is None:
            return
        bucket.take(amount)
        self._changed(bucket_id)

    def _changed(self, bucket_id: BucketId) -> None:
        self._version += 1
        self._entries[bucket_id] = _Entry(self._entries.pop(bucket_id).bucket, self._version)

    def _levels(self, version: int) -> list[BucketLevel]:
        levels = []
        for (key, name), entry in reversed(self._entries.items()):
            if entry.version <= version:
                break
            bucket = entry.bucket
            levels.append(BucketLevel(key, name, int(bucket.size), bucket.level()))
        return levels

    def _purge(self, now_s: float) -> None:
        self._entries = {
            bucket_id: entry
            for bucket_id, entry in self._entries.items()
            if entry.bucket.level() < entry.bucket.size
        }
        self._fronts = {
            name: front for name, front in self._fronts.items() if now_s - front.heard_s < FORGET_S
        }
