"""`LocalLimits`: the buckets and open requests of keys, decided in this process"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from infer.server.tenancy.limit_messages import BucketId, LimitAsk, LimitVerdict
from infer.server.tenancy.token_bucket import Bucket


class LocalLimits:
    """Lives on an event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_shares = 1
        """Number of such processes that divide the limits."""
        self._buckets: dict[BucketId, Bucket] = {}
        """Those not here are full."""
        self._num_open: Counter[str] = Counter()

    async def acquire(self, ask: LimitAsk) -> LimitVerdict:
        """Take what is asked for from the key's limits, if all of it is there."""
        return self._decide(ask, ask.max_open)

    def _decide(self, ask: LimitAsk, max_open: int) -> LimitVerdict:
        bucket_id = (ask.key, ask.bucket)
        bucket = self._bucket(bucket_id, ask.per_minute) if ask.bucket else None
        verdict = decided(ask, bucket, self._num_open[ask.key], max_open)
        if verdict.is_granted and ask.num_opened:
            self._num_open[ask.key] += ask.num_opened
        return verdict

    def change(self, key: str, bucket: str, per_minute: int, amount: float) -> None:
        """Take from a bucket what was used beyond a grant; below 0 = give back."""
        self._bucket((key, bucket), per_minute).take(amount)

    def leave(self, key: str) -> None:
        """A request of a key has ended."""
        self._num_open[key] -= 1
        if self._num_open[key] <= 0:
            del self._num_open[key]

    def level(self, key: str, bucket: str, per_minute: int) -> float:
        """What is in a bucket, as far as is known here."""
        return self._bucket((key, bucket), per_minute).level()

    def num_open(self, key: str) -> int:
        """Number of a key's requests that are open here."""
        return self._num_open[key]

    def _bucket(self, bucket_id: BucketId, per_minute: int) -> Bucket:
        size = per_minute / self._num_shares
        bucket = self._buckets.get(bucket_id)
        if bucket is None:
            bucket = self._buckets[bucket_id] = Bucket(size, self._clock)
        elif bucket.size != size:
            bucket.resize(size)
        return bucket


def decided(ask: LimitAsk, bucket: Bucket | None, num_open: int, max_open: int) -> LimitVerdict:
    """Whether there is what is asked for: room beside `num_open` requests, and the amount in the
    bucket, from which it is taken."""
    level = bucket.level() if bucket else 0.0
    if ask.num_opened and num_open + ask.num_opened > max_open:
        return LimitVerdict(False, is_full=True, level=level)
    if bucket is not None:
        # One request may use a full bucket, which is more than a share: a debt remains.
        if wait_s := bucket.wait_s(min(ask.amount, bucket.size)):
            return LimitVerdict(False, level=level, wait_s=wait_s)
        bucket.take(ask.amount)
        level = bucket.level()
    return LimitVerdict(True, level=level)
