"""`KeptAnswers`: the events of answers that outlive their connection, with a number for each"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Protocol

import msgspec
from starlette.datastructures import Headers

from infer.errors import RequestError
from infer.server.http.error_responses import HttpError
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

KEEP_HEADER = "x-keep-answer"
"""The header of a request whose answer is to be kept: true or false."""
MAX_TAKEN_BYTES = 64 * 1024
"""Bytes of events that a reader takes at once, beyond the first one."""
MAX_READERS = 4
"""Readers of one answer; a further one takes the place of the one that came first."""
NUMBER = {"type": "integer", "minimum": 0, "default": 0}
"""Schema of the number of an event."""
MAX_NUMBER_CHARS = 15
"""Digits of the number of an event in a request."""
EVENT_COST = 64
"""Bytes that an event costs beside its own."""
ANSWER_COST = 2048
"""Bytes that an answer costs beside its events."""


class KeptPiece(msgspec.Struct, array_like=True, frozen=True):
    """What a reader gets at once."""

    data: bytes
    """Numbered events, or what is without a number; empty: there is nothing new."""
    last: int
    """Number of the last event that it has read now."""
    is_end: bool = False
    """Whether nothing comes after it."""
    num_passed: int = 0
    """What has passed without a number so far, of which a reader gets the latest."""


REPLACED = b": another reader has this place now, or the key was revoked\n\n"
GONE = b": the next events are not kept any more\n\n"


class KeptAnswer:
    """The events of one answer. `put`, `mention` and `end` are its writer's."""

    def __init__(
        self,
        owner: str,
        grown: Callable[[int], None],
        ended: Callable[[], None],
        read_all: Callable[[], None],
    ) -> None:
        """`grown` is told how many bytes it costs more; `ended` is called once, at its end;
        `read_all` is called when somebody who has read all after its end asks for more."""
        self.owner = owner
        self.read_all = read_all
        self.has_ended = False
        self.num_bytes = ANSWER_COST
        self._grown = grown
        self._ended = ended
        self._first = 1
        self._events: list[bytes] = []
        self._passing = b""
        self._num_passed = 0
        self._is_kept = True
        self._readers: list[KeptReader] = []

    @property
    def last(self) -> int:
        """Number of the last event so far."""
        return self._first + len(self._events) - 1

    @property
    def num_readers(self) -> int:
        """Those who read it now."""
        return len(self._readers)

    async def put(self, event: bytes) -> None:
        """Add an event of the answer."""
        if not self._is_kept:
            return
        self._events.append(event)
        cost = len(event) + EVENT_COST
        self.num_bytes += cost
        self._grown(cost)
        self._wake()

    async def mention(self, event: bytes) -> None:
        """Show those who have read all what is not kept."""
        self._passing, self._num_passed = event, self._num_passed + 1
        self._wake()

    def end(self) -> None:
        """There are no further events. A second call does nothing."""
        if not self.has_ended:
            self.has_ended = True
            self._ended()
            self._wake()

    def first_reader(self) -> closing[KeptReader]:
        """See `Kept`."""
        return closing(self.read(0))

    def read(self, after: int) -> KeptReader:
        """A reader of what comes behind event `after`, who must `close`. Raises `RequestError` if
        there is no event `after`, `HttpError` (410) if the next one is not kept any more."""
        self.check(after)
        reader = KeptReader(self, after, self._num_passed)
        self._readers.append(reader)
        if len(self._readers) > MAX_READERS:
            self._readers.pop(0).replace()
        return reader

    def check(self, after: int) -> None:
        """Raise the errors of `read`."""
        if after > self.last:
            message = f"after is {after}, and the answer has {self.last} events so far"
            raise RequestError(message, param="after", code="event_unknown")
        if after < self._first - 1:
            message = f"the first event of this answer that is kept is {self._first}"
            raise HttpError(410, message, code="events_gone", param="after")

    def piece(self, after: int, num_passed: int) -> KeptPiece:
        """What is new behind event `after` for who has seen `num_passed` of what passes by."""
        if self.has_ended and after == self.last:
            return KeptPiece(b"", after, is_end=True)
        start = after + 1 - self._first
        if start < 0 or not self._is_kept:
            return KeptPiece(GONE, after, is_end=True)
        events, num_bytes = list[bytes](), 0
        for number in range(start, len(self._events)):
            event = self._events[number]
            num_bytes += len(event)
            if events and num_bytes > MAX_TAKEN_BYTES:
                break
            events.append(b"id: %d\n%b" % (number + self._first, event))
        last = after + len(events)
        is_end = self.has_ended and last == self.last
        if not events and num_passed < self._num_passed:
            return KeptPiece(self._passing, last, is_end, self._num_passed)
        return KeptPiece(b"".join(events), last, is_end, self._num_passed if events else num_passed)

    def drop_beginning(self) -> int:
        """Forget the older half of its events; returns the bytes that are free now."""
        count = (len(self._events) + 1) // 2
        free = sum(map(len, self._events[:count])) + EVENT_COST * count
        del self._events[:count]
        self._first += count
        self.num_bytes -= free
        return free

    def drop(self) -> None:
        """It is not kept any more: nobody gets more of it."""
        self._is_kept = False
        self._first += len(self._events)
        self._events.clear()
        self._wake()

    def leave(self, reader: KeptReader) -> None:
        """Its reader has gone."""
        if reader in self._readers:
            self._readers.remove(reader)

    def _wake(self) -> None:
        for reader in self._readers:
            reader.wake()


class Reader(Protocol):
    """Who reads an answer, here or at another front."""

    async def take(self) -> bytes | None:
        """The next events, as one piece; None after the end."""

    def replace(self) -> None:
        """Let it end now: another one has its place, or its key was revoked."""

    def close(self) -> None:
        """Nothing more is taken."""


class KeptReader:
    """Reads a `KeptAnswer`; one coroutine, on the event loop."""

    def __init__(self, answer: KeptAnswer, after: int, num_passed: int) -> None:
        self._answer = answer
        self._read = KeptPiece(b"", after, num_passed=num_passed)
        self._arrival: asyncio.Future[None] | None = None
        self._last_words = b""
        self._has_all = answer.has_ended and after == answer.last

    async def take(self) -> bytes | None:
        """The next events, as one piece; None after the end."""
        if self._has_all:
            self._answer.read_all()
        while not self._read.is_end:
            if self._last_words:
                self._read = KeptPiece(self._last_words, 0, is_end=True)
                return self._last_words
            self._read = self._answer.piece(self._read.last, self._read.num_passed)
            if self._read.data:
                return self._read.data
            if not self._read.is_end:
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
        return None

    def wake(self) -> None:
        """There is something new."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def replace(self) -> None:
        """It gets nothing more: another one has its place, or its key was revoked."""
        self._last_words = REPLACED
        self.wake()

    def close(self) -> None:
        """Read no more."""
        self._answer.leave(self)


class _Owned:
    """The answers of one owner, by their ids."""

    def __init__(self) -> None:
        self.running: dict[str, KeptAnswer] = {}
        self.ended: OrderedDict[str, KeptAnswer] = OrderedDict()
        """The oldest first."""
        self.num_bytes = 0


class KeptAnswers:
    """A client that asks for it (`KEEP_HEADER`) may read its answer again from any event on, while
    it is written and for some time after its end. What is kept has a limit of bytes for each key
    and one for all. The oldest answer that has ended goes first, then the beginning of the longest
    that runs. An answer is written as fast as the engine makes it, whoever reads it, and a reader
    takes what there is at once, up to `MAX_TAKEN_BYTES`. What only says that a stream lives has no
    number and is not kept. Lives on the event loop. Answers have the ids of contexts."""

    def __init__(self, keep_s: float, limits: ServerLimits = SERVER_LIMITS) -> None:
        """`keep_s`: seconds for which an answer is kept after its end; 0: none is ever kept."""
        self._keep_s = keep_s
        self._max_of_key = limits.max_kept_bytes_of_key
        self._max_bytes = limits.max_kept_bytes
        self._answers: dict[str, KeptAnswer] = {}
        self._owned: dict[str, _Owned] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.num_bytes = 0
        """What all answers cost."""

    def wants(self, headers: Headers, *, streams: bool) -> bool:
        """Whether a request with these headers asks for its answer to be kept, and it will be.
        Raises `RequestError`."""
        given = headers.get(KEEP_HEADER, "false").lower()
        if given not in ("true", "false"):
            raise RequestError("X-Keep-Answer must be true or false", code="invalid_header")
        if given == "true" and not streams:
            message = "X-Keep-Answer needs stream: true, because it is events that are kept"
            raise RequestError(message, param="stream")
        return given == "true" and self._keep_s > 0

    def begin(self, answer_id: str, owner: str) -> KeptAnswer:
        """A new answer, which its writer must `end`."""

        def grown(num_bytes: int) -> None:
            self._count(owner, num_bytes)
            self._make_room(owner)

        ended, read_all = partial(self._end, answer_id), partial(self._forget, answer_id)
        answer = KeptAnswer(owner, grown, ended, read_all)
        owned = self._owned.setdefault(owner, _Owned())
        owned.running[answer_id] = self._answers[answer_id] = answer
        grown(ANSWER_COST)
        return answer

    def get(self, answer_id: str) -> KeptAnswer:
        """Raises `HttpError` (404) if it is not kept."""
        answer = self._answers.get(answer_id)
        if answer is None:
            raise not_kept()
        return answer

    def read(self, answer_id: str, after: int) -> KeptReader:
        """A reader of an answer; see `KeptAnswer.read`. Who asks for what comes behind the last
        event has read all: then it is kept no more."""
        return self.get(answer_id).read(after)

    def _end(self, answer_id: str) -> None:
        owned = self._owned[self._answers[answer_id].owner]
        owned.ended[answer_id] = owned.running.pop(answer_id)
        loop = asyncio.get_running_loop()
        self._timers[answer_id] = loop.call_later(self._keep_s, self._forget, answer_id)

    def _forget(self, answer_id: str) -> None:
        """Keep an answer that has ended no more. A second call does nothing."""
        answer = self._answers.pop(answer_id, None)
        if answer is None:
            return
        self._timers.pop(answer_id).cancel()
        owned = self._owned[answer.owner]
        del owned.ended[answer_id]
        self._count(answer.owner, -answer.num_bytes)
        if not owned.ended and not owned.running:
            del self._owned[answer.owner]
        answer.drop()

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._owned[owner].num_bytes += num_bytes

    def _make_room(self, owner: str) -> None:
        owned = self._owned[owner]
        while owner and owned.num_bytes > self._max_of_key and self._drop_of(owner):
            pass
        while self.num_bytes > self._max_bytes:
            if not self._drop_of(max(self._owned, key=lambda key: self._owned[key].num_bytes)):
                return

    def _drop_of(self, owner: str) -> bool:
        """Free some bytes of an owner; whether there were any."""
        owned = self._owned[owner]
        if owned.ended:
            self._forget(next(iter(owned.ended)))
            return True
        longest = max(owned.running.values(), key=lambda answer: answer.num_bytes)
        free = longest.drop_beginning()
        self._count(owner, -free)
        return free > 0

    def close(self) -> None:
        """End all timers."""
        for timer in self._timers.values():
            timer.cancel()


def not_kept() -> HttpError:
    """The error for an answer that is not kept."""
    message = "the answer to this request is not kept: X-Keep-Answer: true in a request with"
    message += " stream: true asks for that, and answers are kept for some time only"
    return HttpError(404, message, code="answer_not_kept")


def number_of(given: Sequence[str | None]) -> int:
    """The number of the last event that a client has read: the first of the given texts that there
    is; 0 without one. Raises `RequestError`."""
    text = next((value for value in given if value is not None), "0")
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_NUMBER_CHARS):
        message = "after must be the number of an event: an integer, 0 or more"
        raise RequestError(message, param="after", code="invalid_value")
    return int(text)
