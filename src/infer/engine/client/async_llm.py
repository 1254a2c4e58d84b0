"""`AsyncLLM`: the engine for asyncio code; what the server stands on.

`async with engine.stream(request) as pieces` is the one way in: entering takes a place or raises
`OverloadedError`; leaving, for whatever reason, aborts what has not finished. Each request has a
mailbox. The outputs of a step arrive in one message and become text here, on the event loop. The
engine never waits for a reader: a slow reader finds pieces merged, and is cancelled if too much
gathers for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from functools import partial
from typing import Any, Protocol

from infer.engine.client.engine_client import SOFT_LIMIT_S, EngineClient
from infer.engine.client.input import InputProcessor
from infer.engine.client.mailbox import MAX_MAILBOX_BYTES, Mailbox
from infer.engine.client.output import OutputProcessor, collected
from infer.errors import CancelledError, EngineDeadError, EngineError, OverloadedError, RequestError
from infer.types import (
    FinishReason,
    Request,
    RequestOutput,
    StepOutput,
    TextDelta,
)
from infer.types.ends import end_of
from infer.types.engine_stats import RequestCounters, ServingStats
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

MAX_MESSAGES_A_TURN = 8
"""messages of the engine, one a step, that the event loop reads before other tasks have a turn"""
MAX_MAILBOXES_BYTES = 256 * 1024 * 1024
"""bytes that may wait in all mailboxes together; above it the readers that are furthest behind are
cancelled, and what they have not read is dropped"""

_LOOK_S = 0.1
"""seconds between two looks at all mailboxes: there may be thousands"""


class Observer(Protocol):
    """Called on the event loop with what happens to requests."""

    def stepped(self, outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        """A step has ended: its outputs, and what happened in it."""

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """The caller has left a request; `reason`: why it had ended, None if it had not."""


class AsyncLLM:
    """See the module's docstring. Belongs to one event loop, from `start` to `close`."""

    def __init__(
        self, worker: EngineClient, input_processor: InputProcessor, model_name: str
    ) -> None:
        self.model_name = model_name
        self._observer: Observer | None = None
        self.tokenizer = input_processor.tokenizer
        self.make_request = input_processor.make_request
        """a valid request, or a `RequestError` that says why not"""
        self.check_sampling = input_processor.check
        """what several requests with one sampling share; see `InputProcessor.check`"""
        self.max_seq_len = input_processor.limits.max_seq_len
        """longest prompt + output in tokens"""
        self.vocab_size = input_processor.limits.vocab_size
        """number of logits; all token ids are below it"""
        self.num_seats = input_processor.limits.num_seats
        """requests that are computed at the same time"""
        self._worker = worker
        self._input_processor = input_processor
        self._mailboxes: dict[str, Mailbox] = {}
        self._messages: deque[Callable[[], None]] = deque()
        """calls that the engine's thread has sent to the event loop, in order"""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._draining = False
        self._will_look = False
        self._num_reserved = 0
        self._counts = RequestCounters()

    def observe(self, observer: Observer) -> None:
        """Call `observer` for everything that happens from now on. There is one at a time: a second
        call replaces the first observer, as a second app over the same engine does."""
        self._observer = observer

    def expect_grammars(self) -> None:
        """Start the process that checks grammars now; else the first grammar waits for it."""
        self._input_processor.grammars.warm()

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken: started, not closed, and the engine has not died."""
        return not self._closed and self._worker.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether a request that is sent now is worked on at once; implies `is_alive`."""
        return self.is_alive and not self._draining and self._worker.is_ready

    @property
    def is_live(self) -> bool:
        """Whether it is alive and goes on with what there is to do; an idle one does."""
        is_stuck = self.num_open > 0 and self._worker.silence_s >= SOFT_LIMIT_S
        return self.is_alive and not is_stuck

    @property
    def num_open(self) -> int:
        """Requests that callers hold open."""
        return len(self._mailboxes)

    @property
    def num_reserved(self) -> int:
        """Places of requests that are being made."""
        return self._num_reserved

    def drain(self) -> None:
        """From now on finish what there is and refuse what comes."""
        self._draining = True

    async def start(self) -> None:
        """Start the engine; once."""
        self._loop = asyncio.get_running_loop()
        self._worker.start(self._deliver, self._died)

    async def close(self) -> None:
        """End what runs with an error, then stop the engine. Further requests are refused."""
        self._end(EngineDeadError("the server is shutting down"))
        await asyncio.to_thread(self._worker.stop)
        await asyncio.to_thread(self._input_processor.close)

    def _end(self, error: EngineDeadError) -> None:
        self._closed = True
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

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

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Hold places for `count` requests while they are being made: who is refused costs nothing.

        Enter their streams right behind the block, before anything else can happen on the loop.
        Raises what `stream` raises.
        """
        self._check_room(count)
        self._num_reserved += count
        try:
            yield
        finally:
            self._num_reserved -= count

    @asynccontextmanager
    async def stream(
        self, request: Request, *, merge: bool = True
    ) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Run a request; yields its pieces, the last one with a finish reason. Leaving aborts.

        With `merge=False` there is one piece per token, however late it is taken.
        Raises `OverloadedError` if there is no room, `EngineDeadError` if there is no engine.
        """
        mailbox = self._enter(request, merge)
        try:
            yield mailbox.pieces()
        finally:
            del self._mailboxes[request.request_id]
            reason = mailbox.processor.finish_reason
            if reason is None:
                self._worker.abort(request.request_id)
            self._counts.count_end(end_of(None if mailbox.is_cancelled else reason).counter)
            if self._observer is not None:
                self._observer.left(request.request_id, reason)

    def cancel(self, request_id: str, error: RequestError) -> None:
        """End a request now: whoever waits for it gets `error`. Unknown ids are ignored."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None and mailbox.processor.finish_reason is None:
            mailbox.cancel()
            mailbox.fail(error)
            self._worker.abort(request_id)

    async def generate(self, request: Request) -> RequestOutput:
        """Run a request to its end; cancelling the task aborts it.

        Raises what `stream` raises, `EngineError`, or the `RequestError` the engine refused with.
        """
        async with self.stream(request) as pieces:
            return collected(request, [piece async for piece in pieces])

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters of the engine and of this façade, by name."""
        return {**self.read_stats().by_name()}

    def read_stats(self) -> ServingStats:
        """What `stats` says, as a record."""
        return ServingStats(self._worker.stats(), copy(self._counts), self.num_open)

    def _check_room(self, count: int) -> None:
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
        self._counts.num_requests_refused += count
        raise error

    def _enter(self, request: Request, merge: bool) -> Mailbox:
        self._check_room(1)
        if request.request_id in self._mailboxes:
            raise ValueError(f"a request with id {request.request_id!r} is already running")
        mailbox = Mailbox(OutputProcessor(request, self.tokenizer), merge)
        self._mailboxes[request.request_id] = mailbox
        self._counts.num_requests_admitted += 1
        self._worker.add(request)
        return mailbox

    def _deliver(self, outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        """On the engine's thread: hand a step's outputs over to the event loop in one go."""
        self._on_the_loop(partial(self._receive, outputs, step_events))

    def _died(self) -> None:
        """On the engine's thread, which ends now: nobody will answer, so let no caller wait."""
        self._on_the_loop(partial(self._end, EngineDeadError("the engine has died")))

    def _on_the_loop(self, message: Callable[[], None]) -> None:
        assert self._loop is not None
        self._messages.append(message)
        if len(self._messages) > 1:
            return  # the loop has been called for those before
        try:
            self._loop.call_soon_threadsafe(self._read_messages)
        except RuntimeError:  # the loop has been closed; so have all readers
            log.debug("a message is dropped: the event loop is closed")

    def _read_messages(self) -> None:
        """A few, so that after a stall the readers have a turn before everything has come in."""
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
                mailbox.fail(EngineError("the output of this request cannot be made text"))
                self._worker.abort(output.request_id)
                continue
            if piece is not None:
                mailbox.put(piece)
                is_behind = is_behind or mailbox.num_bytes > 0
                is_full = is_full or mailbox.num_bytes > MAX_MAILBOX_BYTES
            if processor.take_abort():
                self._worker.abort(output.request_id, FinishReason.STOP)
        if is_full:  # look when its reader has had a chance
            asyncio.get_running_loop().call_soon(self._end_the_furthest)
        elif is_behind and not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_later(_LOOK_S, self._end_the_furthest)

    def _end_the_furthest(self) -> None:
        """Cancel readers for whom too much has gathered, for each alone or for all together."""
        self._will_look = False
        num_bytes = sum(each.num_bytes for each in self._mailboxes.values())
        for request_id, mailbox in sorted(
            self._mailboxes.items(), key=lambda item: item[1].num_bytes, reverse=True
        ):
            if num_bytes > MAX_MAILBOXES_BYTES:
                num_bytes -= mailbox.num_bytes
                mailbox.drop()
            elif mailbox.num_bytes <= MAX_MAILBOX_BYTES:
                return
            message = "what was not read of the answer has become too much"
            self.cancel(request_id, CancelledError(message, code="client_stalled"))
