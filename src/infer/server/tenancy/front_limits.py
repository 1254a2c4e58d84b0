"""`FrontLimits`: the keys' limits as one of several fronts sees them"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from infer.server.tenancy.limit_messages import (
    BucketChange,
    BucketId,
    LimitAnswer,
    LimitAsk,
    LimitSync,
    LimitVerdict,
    decode_answer,
    encode,
)
from infer.server.tenancy.local_limits import LocalLimits
from infer.server.tenancy.token_bucket import Bucket

ANSWER_S = 0.05
"""Seconds that a request waits for the authority."""
BEAT_S = 0.25
"""Seconds between two sync messages while nothing is asked for."""
LEFT_S = 0.02
"""Seconds after which the authority knows of a request that has ended, and of what it gives back.
"""
CALL_S = 2.0
"""Seconds after which a sync message without an answer is given up, and another one sent."""
LOG_S = 10.0
"""Seconds between two warnings that the authority does not answer."""
_PURGE_EVERY = 1024
"""Sync messages between two searches for buckets that are full, which are dropped."""

log = logging.getLogger("infer.server")
Transport = Callable[[bytes], Awaitable[bytes]]
"""Brings a `LimitSync` to the authority and back its `LimitAnswer`; may raise `AuthorityError`."""


class AuthorityError(Exception):
    """The authority over the keys' limits cannot be reached."""


@dataclass(eq=False)
class _Asked:
    """An ask and who waits for its verdict: None = there is none in time."""

    ask: LimitAsk
    verdict: asyncio.Future[LimitVerdict | None]

    def resolve(self, verdict: LimitVerdict | None) -> bool:
        """Give a verdict to who waits; False if nobody does."""
        if self.verdict.done():
            return False
        self.verdict.set_result(verdict)
        return True


class FrontLimits(LocalLimits):
    """The `LimitAuthority` of the cluster decides for all fronts. A front sends it one sync message
    at a time, with all that its requests ask for at that moment, so a request waits for one round
    trip. An answer that takes more than `ANSWER_S` counts as none: from then on the front decides
    by itself, with its share of each bucket and of each key's open requests (1/F of F fronts),
    until an answer is in time again. Meanwhile it goes on to report what it has used. While the
    authority decides, the buckets are what it has told; else they are this front's shares."""

    def __init__(
        self,
        front: str,
        num_fronts: int,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`front`: name of this front, unique to its process."""
        super().__init__(clock)
        self._front = front
        self._num_fronts = self._num_shares = num_fronts
        self._transport = transport
        self._generation = ""
        self._number = self._confirmed = self._version = 0
        self._is_connected = False
        self._logged_s = -LOG_S
        self._changes: dict[BucketId, BucketChange] = {}
        """What the authority has not been told."""
        self._waiting: list[_Asked] = []
        self._wake = asyncio.Event()
        self._flushing: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the authority decides."""
        return self._is_connected

    # ---- from requests

    async def acquire(self, ask: LimitAsk) -> LimitVerdict:
        """Ask the authority; without an answer in time, decide by this front's share."""
        verdict = await self._ask(ask) if self._is_connected else None
        if verdict is None:
            verdict = self._decide(ask, max(1, ask.max_open // self._num_fronts))
            if verdict.is_granted and ask.bucket:
                self._note(BucketChange(ask.key, ask.bucket, ask.per_minute, ask.amount))
        return verdict

    async def _ask(self, ask: LimitAsk) -> LimitVerdict | None:
        loop = asyncio.get_running_loop()
        asked = _Asked(ask, loop.create_future())
        self._waiting.append(asked)
        self._wake.set()
        timer = loop.call_later(ANSWER_S, self._late, asked)
        try:
            return await asked.verdict
        except asyncio.CancelledError:
            # The request has ended in the turn in which the verdict came.
            if asked.verdict.done() and not asked.verdict.cancelled():
                self._release(ask, asked.verdict.result())
            raise
        finally:
            timer.cancel()

    def _release(self, ask: LimitAsk, verdict: LimitVerdict | None) -> None:
        """Return what the authority has granted to nobody. A share has not paid for it."""
        if verdict is None or not verdict.is_granted:
            return
        if ask.bucket:
            self._note(BucketChange(ask.key, ask.bucket, ask.per_minute, -ask.amount))
        if ask.num_opened:
            self.leave(ask.key)

    def change(self, key: str, bucket: str, per_minute: int, amount: float) -> None:
        if not self._is_connected:
            super().change(key, bucket, per_minute, amount)
        self._note(BucketChange(key, bucket, per_minute, amount))

    def leave(self, key: str) -> None:
        super().leave(key)
        if self._is_connected and self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(LEFT_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self._wake.set()

    def _late(self, asked: _Asked) -> None:
        if asked.resolve(None):
            self._disconnect(f"no answer in {1000 * ANSWER_S:g} ms")

    # ---- whether the authority decides

    def _connect(self) -> None:
        self._is_connected, self._num_shares, self._buckets = True, 1, {}

    def _disconnect(self, why: str = "", asked: Sequence[_Asked] = ()) -> None:
        """Decide by itself from now on, also what was `asked`. The shares begin as full as the
        buckets are; a later answer tells all levels. `why` is logged."""
        waiting, self._waiting = [*self._waiting, *asked], []
        if self._is_connected:
            self._is_connected, self._num_shares, self._version = False, self._num_fronts, 0
            if why and self._clock() - self._logged_s >= LOG_S:
                self._logged_s = self._clock()
                log.warning(
                    "the limits of keys are not shared now (%s): this front gives each key its"
                    " share, 1/%d",
                    why,
                    self._num_fronts,
                )
            told, self._buckets = self._buckets, {}
            for bucket_id, bucket in told.items():
                share = self._buckets[bucket_id] = Bucket(
                    bucket.size / self._num_fronts, self._clock
                )
                share.take((bucket.size - bucket.level()) / self._num_fronts)
        for pending in waiting:
            pending.resolve(None)

    # ---- the authority

    def start(self) -> None:
        """Begin to talk to the authority."""
        self._wake.set()
        self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """End that."""
        if self._flushing is not None:
            self._flushing.cancel()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._disconnect()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            self._wake.clear()
            await self._sync()

    async def _sync(self) -> None:
        asked, self._waiting = self._waiting, []
        changes, self._changes = self._changes, {}
        self._number += 1
        said = LimitSync(
            self._front,
            self._number,
            self._confirmed,
            self._generation,
            self._version,
            [pending.ask for pending in asked],
            list(changes.values()),
            dict(self._num_open),
        )
        began_s = self._clock()
        try:
            async with asyncio.timeout(CALL_S):
                answer = decode_answer(await self._transport(encode(said)))
        except asyncio.CancelledError:
            self._fail(asked, changes)
            raise
        except TimeoutError:
            self._fail(asked, changes, f"no answer in {CALL_S:g} s")
        except Exception as error:  # whatever has failed, the next one may succeed
            self._fail(asked, changes, f"{type(error).__name__}: {error}")
        else:
            if answer.generation != self._generation:
                self._begin_with(answer, asked)
            else:
                is_late = self._clock() - began_s > ANSWER_S or not answer.is_open
                self._on_answer(answer, asked, is_late=is_late, has_all=not said.version)

    def _fail(
        self, asked: list[_Asked], changes: dict[BucketId, BucketChange], why: str = ""
    ) -> None:
        """There is no answer: all that was said is said again, and nothing was granted."""
        for change in changes.values():
            self._note(change)
        self._disconnect(why, asked)

    def _begin_with(self, answer: LimitAnswer, asked: list[_Asked]) -> None:
        """Another authority: tell it what is missing in the shares."""
        self._disconnect("there is another authority", asked)
        self._generation, self._confirmed, self._changes = answer.generation, answer.number, {}
        for (key, bucket), share in self._buckets.items():
            if (missing := share.size - share.level()) > 0:
                per_minute = round(share.size * self._num_fronts)
                self._note(BucketChange(key, bucket, per_minute, missing))
        self._wake.set()

    def _on_answer(
        self, answer: LimitAnswer, asked: list[_Asked], *, is_late: bool, has_all: bool
    ) -> None:
        """`has_all`: whether the answer has the levels of all buckets that are not full."""
        self._confirmed = answer.number
        if has_all and not is_late and not self._is_connected:
            self._connect()
        if self._is_connected:
            self._apply(answer)
        for i, pending in enumerate(asked):
            verdict = answer.verdicts[i] if i < len(answer.verdicts) else None
            if verdict is not None and verdict.is_granted and pending.ask.num_opened:
                self._num_open[pending.ask.key] += pending.ask.num_opened
            if not pending.resolve(verdict):
                self._release(pending.ask, verdict)  # nobody waits for it any more
        if is_late:
            self._disconnect("the authority is late")
        if self._waiting or not (has_all or self._is_connected):
            self._wake.set()

    def _apply(self, answer: LimitAnswer) -> None:
        """Take over the levels that the authority has told."""
        self._version = max(self._version, answer.version)
        for told in answer.levels:
            bucket = Bucket(told.per_minute, self._clock)
            bucket.take(told.per_minute - told.level)
            self._buckets[told.key, told.bucket] = bucket
        if self._number % _PURGE_EVERY == 0:
            buckets = self._buckets.items()
            self._buckets = {name: kept for name, kept in buckets if kept.level() < kept.size}

    def _note(self, change: BucketChange) -> None:
        """Tell the authority with the next sync message."""
        bucket_id = (change.key, change.bucket)
        before = self._changes.get(bucket_id)
        amount = change.amount + (before.amount if before else 0)
        self._changes[bucket_id] = BucketChange(*bucket_id, change.per_minute, amount)
