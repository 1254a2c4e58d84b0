"""`FrontLimits`: the keys' limits as one of several fronts sees them; `SharedTenant`: a key there

The `LimitAuthority` of the cluster decides for all fronts. A front sends it one exchange at a time,
with all that its requests ask for at that moment, so a request waits for one round trip. An answer
that takes more than `ANSWER_S` counts as none: from then on the front decides by itself, with its
share of each bucket and of each key's open requests (1/F of F fronts), until an answer is in time
again. Meanwhile it goes on to report what it has used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from infer.server.http.context import RequestContext
from infer.server.tenancy.keys import Key
from infer.server.tenancy.limit_messages import (
    BucketChange,
    Exchange,
    LimitAnswer,
    LimitAsk,
    LimitVerdict,
    decode_answer,
    encode,
)
from infer.server.tenancy.limits import Tenant
from infer.server.tenancy.token_bucket import Bucket
from infer.types import Request

ANSWER_S = 0.05
"""seconds that a request waits for the authority"""
BEAT_S = 0.25
"""seconds between two exchanges while nothing is asked for"""
LEFT_S = 0.02
"""seconds after which the authority knows of a request that has ended, and of what it gives back"""
CALL_S = 2.0
"""seconds after which an exchange without an answer is given up, and another one begun"""
LOG_S = 10.0
"""seconds between two warnings that the authority does not answer"""
_PURGE_EVERY = 1024
"""exchanges between two searches for buckets that are full, which are dropped"""

log = logging.getLogger("infer.server")
Carrier = Callable[[bytes], Awaitable[bytes]]
"""brings an `Exchange` to the authority and back its `LimitAnswer`; may raise `AuthorityError`"""
_Place = tuple[str, str]
"""key id and name of a bucket"""


class AuthorityError(Exception):
    """The authority over the keys' limits cannot be reached."""


@dataclass(eq=False)
class _Asked:
    """An ask and who waits for its verdict: None = there is none in time."""

    ask: LimitAsk
    verdict: asyncio.Future[LimitVerdict | None]


class FrontLimits:
    """See the module's docstring. Lives on an event loop."""

    def __init__(
        self,
        front: str,
        num_fronts: int,
        carrier: Carrier,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`front`: name of this front, unique to its process."""
        self._front = front
        self._num_fronts = num_fronts
        self._carrier = carrier
        self._clock = clock
        self._incarnation = ""
        self._number = self._confirmed = self._version = 0
        self._is_connected = False
        self._logged_s = -LOG_S
        self._mirrors: dict[_Place, Bucket] = {}
        """the buckets of the authority, as it has told; those not here are full"""
        self._shares: dict[_Place, Bucket] = {}
        """this front's parts of them, while it decides by itself"""
        self._changes: dict[_Place, BucketChange] = {}
        """what the authority has not been told"""
        self._num_open: Counter[str] = Counter()
        self._waiting: list[_Asked] = []
        self._wake = asyncio.Event()
        self._flushing: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the authority decides."""
        return self._is_connected

    # ---- from requests

    async def take(self, ask: LimitAsk) -> LimitVerdict:
        """Ask the authority; without an answer in time, decide by this front's share."""
        if self._is_connected:
            verdict = await self._ask(ask)
            if verdict is not None:
                return verdict
        return self._decide(ask)

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
                self._undo(ask, asked.verdict.result())
            raise
        finally:
            timer.cancel()

    def _undo(self, ask: LimitAsk, verdict: LimitVerdict | None) -> None:
        """Return what the authority has granted to nobody. A share has not paid for it."""
        if verdict is None or not verdict.is_granted:
            return
        if ask.bucket:
            self._note(BucketChange(ask.key, ask.bucket, ask.per_minute, -ask.amount))
        if ask.places:
            self.leave(ask.key)

    def give_back(self, ask: LimitAsk) -> None:
        """Return what was granted and not used."""
        self.change(ask.key, ask.bucket, ask.per_minute, -ask.amount)
        if ask.places:
            self.leave(ask.key)

    def change(self, key: str, bucket: str, per_minute: int, amount: float) -> None:
        """Take from a bucket what was used beyond a grant; below 0 = give back."""
        if not bucket or not amount:
            return
        if not self._is_connected:
            self._share((key, bucket), per_minute).take(amount)
        self._note(BucketChange(key, bucket, per_minute, amount))

    def leave(self, key: str) -> None:
        """A request of a key has ended."""
        self._num_open[key] -= 1
        if self._num_open[key] <= 0:
            del self._num_open[key]
        if self._is_connected and self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(LEFT_S, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        self._wake.set()

    def level(self, key: str, bucket: str, per_minute: int) -> float:
        """What this front thinks that is in a bucket."""
        place = (key, bucket)
        if not self._is_connected:
            return self._share(place, per_minute).level()
        mirror = self._mirrors.get(place)
        return float(per_minute) if mirror is None else mirror.level()

    # ---- its own share

    def _decide(self, ask: LimitAsk) -> LimitVerdict:
        has_bucket = bool(ask.bucket)
        share = self._share((ask.key, ask.bucket), ask.per_minute) if has_bucket else None
        level = share.level() if share else 0.0
        most = max(1, ask.max_open // self._num_fronts)
        if ask.places and self._num_open[ask.key] + ask.places > most:
            return LimitVerdict(False, has_no_place=True, level=level)
        if share is not None:
            # One request may use a full bucket, which is more than a share: a debt remains.
            if wait_s := share.wait_s(min(ask.amount, share.size)):
                return LimitVerdict(False, level=level, wait_s=wait_s)
            share.take(ask.amount)
            self._note(BucketChange(ask.key, ask.bucket, ask.per_minute, ask.amount))
            level = share.level()
        if ask.places:
            self._num_open[ask.key] += ask.places
        return LimitVerdict(True, level=level)

    def _share(self, place: _Place, per_minute: int) -> Bucket:
        """The share of a bucket, which has begun as the bucket's last known level says."""
        size = per_minute / self._num_fronts
        share = self._shares.get(place)
        if share is None:
            share = self._shares[place] = Bucket(size, self._clock)
        elif share.size != size:
            share.resize(size)
        return share

    def _go_away(self, why: str, asked: Sequence[_Asked] = ()) -> None:
        """Decide by itself from now on, also what was `asked`."""
        waiting, self._waiting = [*self._waiting, *asked], []
        if self._is_connected:
            self._is_connected = False
            if self._clock() - self._logged_s >= LOG_S:
                self._logged_s = self._clock()
                log.warning(
                    "the limits of keys are not shared now (%s): this front gives each key its"
                    " share, 1/%d",
                    why,
                    self._num_fronts,
                )
            self._shares = {}
            for place, mirror in self._mirrors.items():
                share = self._shares[place] = Bucket(mirror.size / self._num_fronts, self._clock)
                share.take((mirror.size - mirror.level()) / self._num_fronts)
        for each in waiting:
            _tell(each, None)

    def _late(self, asked: _Asked) -> None:
        if not asked.verdict.done():
            asked.verdict.set_result(None)
            self._go_away(f"no answer in {1000 * ANSWER_S:g} ms")

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
        self._is_connected = False
        self._go_away("this front ends")

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._wake.wait()
            self._wake.clear()
            await self._exchange()

    async def _exchange(self) -> None:
        asked, self._waiting = self._waiting, []
        changes, self._changes = self._changes, {}
        self._number += 1
        number, began_s = self._number, self._clock()
        said = Exchange(
            self._front,
            number,
            self._confirmed,
            self._incarnation,
            self._version,
            [each.ask for each in asked],
            list(changes.values()),
            dict(self._num_open),
        )
        try:
            async with asyncio.timeout(CALL_S):
                answer = decode_answer(await self._carrier(encode(said)))
        except asyncio.CancelledError:
            self._is_connected = False
            self._fail(asked, changes, "this front ends")
            raise
        except TimeoutError:
            self._fail(asked, changes, f"no answer in {CALL_S:g} s")
            return
        except Exception as error:  # whatever has failed, the next exchange may succeed
            self._fail(asked, changes, f"{type(error).__name__}: {error}")
            return
        if answer.incarnation != self._incarnation:
            self._meet(answer, asked)
        else:
            self._hear(answer, asked, self._clock() - began_s)

    def _fail(self, asked: list[_Asked], changes: dict[_Place, BucketChange], why: str) -> None:
        """There is no answer: all that was said is said again, and nothing was granted."""
        for change in changes.values():
            self._note(change)
        self._go_away(why, asked)

    def _meet(self, answer: LimitAnswer, asked: list[_Asked]) -> None:
        """Another authority: tell it what is missing in the shares."""
        self._go_away("there is another authority", asked)
        self._incarnation, self._confirmed, self._version = answer.incarnation, answer.number, 0
        self._mirrors, self._changes = {}, {}
        for (key, bucket), share in self._shares.items():
            if (missing := share.size - share.level()) > 0:
                per_minute = round(share.size * self._num_fronts)
                self._note(BucketChange(key, bucket, per_minute, missing))
        self._wake.set()

    def _hear(self, answer: LimitAnswer, asked: list[_Asked], took_s: float) -> None:
        self._confirmed, self._version = answer.number, max(self._version, answer.version)
        for told in answer.levels:
            place = (told.key, told.bucket)
            mirror = self._mirrors[place] = Bucket(told.per_minute, self._clock)
            mirror.take(told.per_minute - told.level)
        if self._number % _PURGE_EVERY == 0:
            mirrors = self._mirrors.items()
            self._mirrors = {place: each for place, each in mirrors if each.level() < each.size}
        for i, each in enumerate(asked):
            verdict = answer.verdicts[i] if i < len(answer.verdicts) else None
            if verdict is not None and verdict.is_granted and each.ask.places:
                self._num_open[each.ask.key] += each.ask.places
            if not _tell(each, verdict):
                self._undo(each.ask, verdict)  # nobody waits for it any more
        if took_s > ANSWER_S or not answer.is_open:
            self._go_away(f"the answer took {1000 * took_s:.0f} ms")
        elif not self._is_connected:
            self._is_connected = True
            self._shares = {}
        if self._waiting:
            self._wake.set()

    def _note(self, change: BucketChange) -> None:
        """Tell the authority with the next exchange."""
        place = (change.key, change.bucket)
        before = self._changes.get(place)
        amount = change.amount + (before.amount if before else 0)
        self._changes[place] = BucketChange(*place, change.per_minute, amount)


def _tell(asked: _Asked, verdict: LimitVerdict | None) -> bool:
    """Give a verdict to who waits; False if nobody does."""
    if asked.verdict.done():
        return False
    asked.verdict.set_result(verdict)
    return True


class _SharedBucket(Bucket):
    """A bucket of a key, at the authority or in this front's share."""

    def __init__(self, limits: FrontLimits, place: _Place, per_minute: int) -> None:
        super().__init__(per_minute, lambda: 0.0)
        self._limits = limits
        self._where = (*place, per_minute)

    def level(self) -> float:
        return self._limits.level(*self._where)

    def take(self, amount: float) -> None:
        self._limits.change(*self._where, amount)


class SharedTenant(Tenant):
    """A `Tenant` whose buckets and open requests are those of all fronts together."""

    def __init__(self, key: Key, limits: FrontLimits) -> None:
        super().__init__(key)
        self._limits = limits
        self._buckets = {
            name: _SharedBucket(limits, (key.id, name), int(bucket.size))
            for name, bucket in self._buckets.items()
        }
        self._verdicts: dict[tuple[str, str], tuple[LimitAsk, LimitVerdict]] = {}
        """by the context's id and the bucket's name: what has been asked and is not used yet"""

    async def ask_to_enter(self, context: RequestContext) -> None:
        most = self.key.limits.max_concurrent
        await self._ask("requests", 1, context, places=1, max_open=most)

    async def ask_for_chars(self, num_chars: int, context: RequestContext) -> None:
        if amount := self._tokens_of_chars(num_chars):
            await self._ask("tokens", amount, context)

    async def ask_for_tokens(self, requests: Sequence[Request], context: RequestContext) -> None:
        if "tokens" in self._buckets:
            await self._ask("tokens", self._tokens_to_reserve(requests), context)

    async def _ask(
        self, name: str, amount: int, context: RequestContext, places: int = 0, max_open: int = 0
    ) -> None:
        bucket = self._buckets.get(name)
        size = int(bucket.size) if bucket else 0
        ask = LimitAsk(self.key.id, name if bucket else "", size, amount, places, max_open)
        self._verdicts[context.id, name] = ask, await self._limits.take(ask)
        context.cleanup.callback(self._return_unused, context.id, name)

    def _return_unused(self, context_id: str, name: str) -> None:
        found = self._verdicts.pop((context_id, name), None)
        if found is not None and found[1].is_granted:
            self._limits.give_back(found[0])

    def enter(self, context: RequestContext) -> None:
        super().enter(context)
        self._verdicts.pop((context.id, "requests"), None)

    def _has_place(self, context: RequestContext) -> bool:
        return not self._verdicts[context.id, "requests"][1].has_no_place

    def _leave(self) -> None:
        super()._leave()
        self._limits.leave(self.key.id)

    def _spend(
        self, name: str, bucket: Bucket, amount: float, context: RequestContext
    ) -> tuple[float, float]:
        _, verdict = self._verdicts.pop((context.id, name))
        return verdict.wait_s, verdict.level
