"""`AsyncLLM`: the asyncio façade, on which the server is built

`async with engine.stream(request) as pieces` runs a request. Entering takes a place (or raises
`OverloadedError`); leaving for any reason aborts an unfinished request. `reserved` holds places for
requests that are still being made, and hands them over. Each request has a mailbox. The outputs of
a step arrive in one message and are turned into text here, on the event loop. A slow reader gets
the waiting pieces merged into one. A request for which too much waits is cancelled; the engine
never waits for a reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial, reduce
from typing import Any, Protocol, TypeVar

from infer.engine.client.input import InputProcessor
from infer.engine.client.output import OutputProcessor, collected
from infer.engine.loop import SOFT_LIMIT_S, EngineClient
from infer.errors import CancelledError, EngineDeadError, EngineError, OverloadedError, RequestError
from infer.types import (
    ErrorRecord,
    FinishReason,
    Request,
    RequestOutput,
    StepOutput,
    TextDelta,
)
from infer.types.ends import end_of
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

T = TypeVar("T")

COUNTS = (
    *("num_requests_admitted", "num_requests_refused"),
    *("num_requests_finished", "num_requests_cancelled", "num_requests_failed"),
)
"""counters of the façade; at any moment admitted = num_open + finished + cancelled + failed"""
MAX_MESSAGES_A_TURN = 8
"""maximum number of engine steps that the event loop reads before it runs other tasks"""
MAX_MAILBOX_BYTES = 256 * 1024
"""approximate bytes that may wait for one reader after merging; beyond it the request is
cancelled"""
MAX_MAILBOXES_BYTES = 256 * 1024 * 1024
"""approximate bytes that may wait for all readers together; beyond it the requests with most are
cancelled and their pieces dropped"""

_CHECK_INTERVAL_S = 0.1
"""minimum seconds between two checks of all mailboxes, of which there may be thousands"""


class Mailbox:
    """The pieces of one request that have arrived and have not been read."""

    def __init__(self, processor: OutputProcessor, merge: bool) -> None:
        self.processor = processor
        self.is_cancelled = False
        self._merge = merge
        self._pieces: list[TextDelta] = []
        self.num_bytes = 0
        """approximate bytes of the pieces that wait because the reader is slow"""
        self._reader: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """Count the request as cancelled, with whatever finish reason it ends."""
        self.is_cancelled = True

    def drop(self) -> None:
        """Drop all waiting pieces, the final one included; the next piece is the first again."""
        self._pieces, self.num_bytes, self.processor.finish_reason = [], 0, None

    def put(self, piece: TextDelta) -> None:
        """Add a piece; called on the event loop."""
        if self._pieces:  # the reader is slow; otherwise counting is not worth its time
            self.num_bytes += _size_of(piece)
            if self.num_bytes > MAX_MAILBOX_BYTES and self._merge:
                self._pieces = [reduce(TextDelta.merge, self._pieces)]
                self.num_bytes = _size_of(self._pieces[0]) + _size_of(piece)
        self._pieces.append(piece)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[TextDelta]:
        """Wait until a piece is there and take all of them (merged into one, if so constructed).
        There may be one reader at a time."""
        if not self._pieces:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces, self._pieces, self.num_bytes = self._pieces, [], 0
        return [reduce(TextDelta.merge, pieces)] if self._merge else pieces


def _size_of(piece: TextDelta) -> int:
    """Approximate bytes that a piece takes in memory."""
    pairs = sum(1 + len(each.top) for each in piece.logprobs)
    return 200 + len(piece.text) + 48 * len(piece.token_ids) + 125 * pairs


class RequestStream:
    """A running request in its caller's hands. Iterating gives its pieces, the last of which has a
    finish reason, to one reader at a time. The caller closes it."""

    def __init__(self, request: Request, mailbox: Mailbox, leave: Callable[[], None]) -> None:
        """`leave` is called once, by the first `close`."""
        self._request = request
        self._mailbox = mailbox
        self._leave: Callable[[], None] | None = leave

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return _pieces(self._mailbox)

    async def output(self) -> RequestOutput:
        """The whole output, once the request has ended; closes the stream. Raises `EngineError` if
        the request fails, and the `RequestError` with which the engine refuses it."""
        with closing(self):
            return collected(self._request, [piece async for piece in self])

    def close(self) -> None:
        """Abort the request if it has not finished. A second call does nothing."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Reservation:
    """Places that are held for requests while they are made."""

    def __init__(self, count: int, enter: Callable[[Request, bool], RequestStream]) -> None:
        """`count`: places. `enter` runs a request in one of them."""
        self._num_left = count
        self._enter = enter

    def enter(self, request: Request, *, merge: bool = True) -> RequestStream:
        """Run a request, which takes over one of the places; see `AsyncLLM.enter`. Nobody else can
        get the place in between. Raises `EngineDeadError` if there is no engine any more."""
        if not self._num_left:
            raise ValueError("no place of this reservation is left")
        stream = self._enter(request, merge)
        self._num_left -= 1
        return stream

    def release(self) -> int:
        """Give up the places that no request has taken over; returns how many they were."""
        count, self._num_left = self._num_left, 0
        return count


class Observer(Protocol):
    """Is called for what happens to requests; on the event loop."""

    def stepped(self, outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        """Called with a step's outputs and its events."""

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """Called when a caller has left a request's stream; `reason` is None if the request had not
        finished."""


class AsyncLLM:
    """See the module's docstring. Belongs to one event loop, from `start` to `close`."""

    def __init__(
        self, worker: EngineClient, input_processor: InputProcessor, model_name: str
    ) -> None:
        self.model_name = model_name
        self._observer: Observer | None = None
        self.tokenizer = input_processor.tokenizer
        self.make_request = input_processor.make_request
        """see `InputProcessor.make_request`"""
        self.check_sampling = input_processor.check
        """see `InputProcessor.check`"""
        self.max_seq_len = input_processor.limits.max_seq_len
        """maximum length of prompt and output together, in tokens"""
        self.vocab_size = input_processor.limits.vocab_size
        """number of token ids"""
        self.num_seats = input_processor.limits.num_seats
        """maximum number of requests in the batch"""
        self._worker = worker
        self._input_processor = input_processor
        self._mailboxes: dict[str, Mailbox] = {}
        self._messages: deque[Callable[[], None]] = deque()
        """messages from the engine's thread that the event loop has not handled, in order"""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._draining = False
        self._check_is_planned = False
        self._num_reserved = 0
        self._counts = dict.fromkeys(COUNTS, 0)

    def observe(self, observer: Observer) -> None:
        """Call `observer` for all further events. There is one observer; a second call, from a
        second app over the same engine, replaces the first."""
        self._observer = observer

    def expect_grammars(self) -> None:
        """Start the grammar checker in the background; otherwise the first grammar waits for it."""
        self._input_processor.grammars.warm()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted: started, not closed, and the engine has not died."""
        return not self._closed and self._worker.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether the engine would work on a request that is sent now; implies `is_alive`."""
        return self.is_alive and not self._draining and self._worker.is_ready

    @property
    def is_live(self) -> bool:
        """Whether it is alive and does not hang: with open requests, the engine has reported within
        `SOFT_LIMIT_S`."""
        is_stuck = self.num_open > 0 and self._worker.silence_s >= SOFT_LIMIT_S
        return self.is_alive and not is_stuck

    @property
    def num_open(self) -> int:
        """Number of requests whose streams are open."""
        return len(self._mailboxes)

    @property
    def num_reserved(self) -> int:
        """Number of places held for requests that are being made."""
        return self._num_reserved

    def drain(self) -> None:
        """Refuse further requests and finish those that are open."""
        self._draining = True

    async def start(self) -> None:
        """Start the engine; once."""
        self._loop = asyncio.get_running_loop()
        self._worker.start(self._deliver, self._died)

    async def close(self) -> None:
        """End open requests with an error, then stop the engine. Further requests are refused."""
        self._end(EngineDeadError("the server is shutting down"))
        await asyncio.to_thread(self._worker.stop)
        await asyncio.to_thread(self._input_processor.close)

    def _end(self, error: EngineDeadError) -> None:
        self._closed = True
        for mailbox in self._mailboxes.values():
            _fail(mailbox, error)

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any
    ) -> list[int]:
        """The token ids of a conversation; see `Tokenizer.apply_chat_template`."""
        return self.tokenizer.apply_chat_template(messages, **template_arguments)[1]

    def refusal(self) -> OverloadedError | None:
        """Why one more request would be refused for want of room, counted as refused; None where
        there is room, or where something else would be wrong with it."""
        try:
            self._check_capacity(1)
        except OverloadedError as error:
            return error
        except EngineDeadError:
            self._counts["num_requests_refused"] -= 1  # whoever raises it will count it
        return None

    @contextmanager
    def reserved(self, count: int) -> Iterator[Reservation]:
        """Hold places for `count` requests while they are made, so that a refused request costs no
        work. A place is held until a request takes it over (`Reservation.enter`) or the block is
        left.

        Raises `OverloadedError` or `EngineDeadError`, like `stream`.
        """
        self._check_capacity(count)
        self._num_reserved += count
        reservation = Reservation(count, self._take_over)
        try:
            yield reservation
        finally:
            self._num_reserved -= reservation.release()

    def _take_over(self, request: Request, merge: bool) -> RequestStream:
        self._num_reserved -= 1
        try:
            return self.enter(request, merge=merge)
        except BaseException:
            self._num_reserved += 1
            raise

    def enter(self, request: Request, *, merge: bool = True) -> RequestStream:
        """Run a request; the caller closes the stream. `stream` does both.

        `merge=False` keeps one piece per token for a slow reader too. Raises `OverloadedError` if
        the queue is full, `EngineDeadError` if the engine is not running or the server shuts down.
        """
        self._check_capacity(1)
        if request.request_id in self._mailboxes:
            raise ValueError(f"a request with id {request.request_id!r} is already running")
        mailbox = Mailbox(OutputProcessor(request, self.tokenizer), merge)
        self._mailboxes[request.request_id] = mailbox
        self._counts["num_requests_admitted"] += 1
        self._worker.add(request)
        return RequestStream(request, mailbox, partial(self._leave, request.request_id))

    def _leave(self, request_id: str) -> None:
        mailbox = self._mailboxes.pop(request_id)
        reason = mailbox.processor.finish_reason
        if reason is None:
            self._worker.abort(request_id)
        self._counts[end_of(None if mailbox.is_cancelled else reason).counter] += 1
        if self._observer is not None:
            self._observer.left(request_id, reason)

    @asynccontextmanager
    async def stream(
        self, request: Request, *, merge: bool = True
    ) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Run a request; yields an iterator over its pieces, the last of which has a finish reason.

        Leaving the block aborts an unfinished request. Parameters and errors: see `enter`.
        """
        with closing(self.enter(request, merge=merge)) as running:
            yield aiter(running)

    def cancel(self, request_id: str, error: RequestError) -> None:
        """End a request now with `error`, which its reader gets. Unknown ids are ignored."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None and mailbox.processor.finish_reason is None:
            mailbox.cancel()
            _fail(mailbox, error)
            self._worker.abort(request_id)

    async def generate(self, request: Request) -> RequestOutput:
        """Run a request to its end; cancelling the task aborts it.

        Raises the errors of `enter` and of `RequestStream.output`.
        """
        return await self.enter(request).output()

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters of engine and façade by name."""
        stats = self._worker.stats()
        counts = {name: count + stats.get(name, 0) for name, count in self._counts.items()}
        return {**stats, "num_open": self.num_open, **counts}

    def _check_capacity(self, count: int) -> None:
        num_taken = len(self._mailboxes) + self._num_reserved
        error: EngineDeadError | OverloadedError
        if not self.is_alive:
            error = EngineDeadError("the engine is not running")
        elif self._draining:
            error = EngineDeadError("the server is shutting down")
        elif num_taken + count > self._input_processor.limits.max_unfinished:
            busy = f"the server is busy: {num_taken} requests are running or waiting"
            error = OverloadedError(busy)
        else:
            return
        self._counts["num_requests_refused"] += count
        raise error

    def _deliver(self, outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        """Send a step's outputs to the event loop; called on the engine's thread."""
        self._send_to_loop(partial(self._receive, outputs, step_events))

    def _died(self) -> None:
        """End all requests, because the engine has died; called on its thread."""
        self._send_to_loop(partial(self._end, EngineDeadError("the engine has died")))

    def _send_to_loop(self, message: Callable[[], None]) -> None:
        assert self._loop is not None
        self._messages.append(message)
        if len(self._messages) > 1:
            return  # a call is scheduled already
        try:
            self._loop.call_soon_threadsafe(self._read_messages)
        except RuntimeError:  # the loop has been closed, and so have all readers
            log.debug("a message is dropped: the event loop is closed")

    def _read_messages(self) -> None:
        """Handle at most `MAX_MESSAGES_A_TURN` messages, so that readers run in between."""
        try:
            for _ in range(min(len(self._messages), MAX_MESSAGES_A_TURN)):
                self._messages.popleft()()
        finally:
            if self._messages:
                asyncio.get_running_loop().call_soon(self._read_messages)

    def _receive(self, outputs: list[StepOutput], step_events: StepEvents | None = None) -> None:
        is_full = is_behind = False
        if self._observer is not None:
            self._observer.stepped(outputs, step_events)
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            processor = mailbox.processor
            try:
                piece = processor.push(output)
            except Exception:
                log.exception("request %s: its output cannot be made text", output.request_id)
                _fail(mailbox, EngineError("the output of this request cannot be made text"))
                self._worker.abort(output.request_id)
                continue
            if piece is not None:
                mailbox.put(piece)
                is_behind = is_behind or mailbox.num_bytes > 0
                is_full = is_full or mailbox.num_bytes > MAX_MAILBOX_BYTES
            if processor.take_abort():
                self._worker.abort(output.request_id, FinishReason.STOP)
        if is_full:  # checked after its reader has had a chance to run
            asyncio.get_running_loop().call_soon(self._cancel_stalled)
        elif is_behind and not self._check_is_planned:
            self._check_is_planned = True
            asyncio.get_running_loop().call_later(_CHECK_INTERVAL_S, self._cancel_stalled)

    def _cancel_stalled(self) -> None:
        """Cancel requests with too many unread bytes, alone or together with all others."""
        self._check_is_planned = False
        num_bytes = sum(each.num_bytes for each in self._mailboxes.values())
        for request_id, mailbox in sorted(
            self._mailboxes.items(), key=lambda item: item[1].num_bytes, reverse=True
        ):
            if num_bytes > MAX_MAILBOXES_BYTES:
                num_bytes -= mailbox.num_bytes
                mailbox.drop()
            elif mailbox.num_bytes <= MAX_MAILBOX_BYTES:
                return
            message = "the client reads too slowly: too much of the answer was waiting to be read"
            self.cancel(request_id, CancelledError(message, code="client_stalled"))


def _fail(mailbox: Mailbox, error: EngineError | RequestError) -> None:
    if mailbox.processor.finish_reason is None:
        mailbox.processor.finish_reason = FinishReason.ERROR
        reason = ErrorRecord.of(error)
        mailbox.put(TextDelta("", (), finish_reason=FinishReason.ERROR, error=reason))


async def _pieces(mailbox: Mailbox) -> AsyncIterator[TextDelta]:
    while True:
        for piece in await mailbox.take():
            yield piece
            if piece.finish_reason is not None:
                return
