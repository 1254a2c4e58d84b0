"""`AsyncLLM`: the asyncio façade, on which the server is built"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from copy import copy
from functools import partial
from itertools import islice
from typing import Any, Protocol

from infer.engine.client.input import InputProcessor
from infer.engine.client.mailbox import Mailbox, MailboxLimits, OpenRequest
from infer.engine.client.output import OutputProcessor, collected
from infer.engine.engine_client import EngineClient
from infer.errors import (
    CancelledError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
    too_many_tokens,
)
from infer.requests.state import FoldedStep, RequestState, RequestStates
from infer.text.untrusted.workers import Steps
from infer.types import (
    FinishReason,
    Request,
    RequestOutput,
    StepOutput,
    TextDelta,
)
from infer.types.ends import end_of
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats, RequestCounters
from infer.types.stats_summary import ServingStats
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

MAX_MESSAGES_A_TURN = 8
"""Maximum number of engine steps that the event loop reads before it runs other tasks."""
_CHECK_INTERVAL_S = 0.1
"""Minimum seconds between two checks of all mailboxes, of which there may be thousands."""


class RequestStream:
    """A running request, held by its caller, who must `close` it.

    Iterating yields its pieces, the last of which has a finish reason. There may be one reader at a
    time.
    """

    def __init__(self, request: Request, mailbox: Mailbox, leave: Callable[[], None]) -> None:
        """`leave` is called once, by the first `close`."""
        self._request = request
        self._mailbox = mailbox
        self._leave: Callable[[], None] | None = leave

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        return self._mailbox.pieces()

    async def output(self) -> RequestOutput:
        """Wait for the request's end, close the stream and return the whole output. Raises
        `EngineError` if the request fails, and the `RequestError` with which the engine refuses
        it."""
        with closing(self):
            return collected(self._request, [piece async for piece in self])

    def close(self) -> None:
        """Abort the request if it has not finished. A second call does nothing."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()


class Reservation:
    """Places in the queue that are held for requests which are being made."""

    def __init__(
        self,
        count: int,
        enter: Callable[[Request, bool], RequestStream],
        check_waiting_tokens: Callable[[Sequence[int]], None],
    ) -> None:
        """`enter` runs a request in one of the held places. `check_waiting_tokens` raises
        `OverloadedError` for lengths of prompts that may not wait."""
        self._num_left = count
        self._enter = enter
        self._check_waiting_tokens = check_waiting_tokens

    def check(self, requests: Sequence[Request]) -> None:
        """Raise `OverloadedError` if the prompts of all these requests together would exceed
        `max_waiting_tokens`, so that none of them is begun. Lengths are not known before."""
        self._check_waiting_tokens([len(request.prompt_token_ids) for request in requests])

    def enter(self, request: Request, *, merge: bool = True) -> RequestStream:
        """Run a request in one of the held places, which no other request can take in between; see
        `AsyncLLM.enter`. Raises `EngineDeadError` if the engine has ended."""
        if not self._num_left:
            raise ValueError("no place of this reservation is left")
        stream = self._enter(request, merge)
        self._num_left -= 1
        return stream

    def release(self) -> int:
        """Give up the places that no request has taken; returns their number."""
        count, self._num_left = self._num_left, 0
        return count


class Observer(Protocol):
    """Is called for what happens to requests; on the event loop."""

    def entered(self, request: Request, state: RequestState) -> None:
        """Called when a request is sent to the engine; its `state` changes from then on."""

    def stepped(self, step: FoldedStep) -> None:
        """Called for each step, once the states of the requests have followed it."""

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """Called when a caller has left a request's stream; `reason` is None if the request had not
        finished."""


class AsyncLLM:
    """`async with engine.stream(request) as pieces` runs a request. Entering takes a place (or
    raises `OverloadedError`); leaving for any reason aborts an unfinished request. `reserved` holds
    places for requests that are still being made and hands them over. Each request has a mailbox.
    The outputs of a step arrive in one message and are turned into text here, on the event loop. A
    slow reader gets the waiting pieces merged into one. A request for which too much waits is
    cancelled; the engine never waits for a reader. Belongs to one event loop, from `start` to
    `close`."""

    def __init__(
        self,
        worker: EngineClient,
        input_processor: InputProcessor,
        model_name: str,
        mailbox_limits: MailboxLimits | None = None,
    ) -> None:
        self.model_name = model_name
        self._observer: Observer | None = None
        self.tokenizer = input_processor.tokenizer
        self.make_request = input_processor.make_request
        """See `InputProcessor.make_request`."""
        self.another_choice = input_processor.another_choice
        """See `InputProcessor.another_choice`."""
        self.check_sampling = input_processor.checking
        """See `InputProcessor.checking`."""
        self.sampling_defaults = input_processor.defaults
        """What requests get where they leave out fields."""
        self.max_seq_len = input_processor.limits.max_seq_len
        """Maximum length of prompt and output together, in tokens."""
        self.vocab_size = input_processor.limits.vocab_size
        """Number of token ids."""
        self.num_seats = input_processor.limits.num_seats
        """Maximum number of requests in the batch."""
        self.max_waiting = input_processor.limits.max_waiting_requests
        """Maximum number of requests beside these."""
        self.batching_mode = input_processor.limits.batching_mode
        self.page_size = input_processor.limits.page_size
        """Tokens in a page of the KV cache."""
        self.weights = input_processor.limits.weights
        self.weight_bytes = input_processor.limits.weight_bytes
        """See `EngineLimits`, as the one before."""
        self.engine_client = worker
        """The engine: a thread or a process."""
        self._input_processor = input_processor
        self._mailbox_limits = mailbox_limits or MailboxLimits()
        self._mailboxes: dict[str, Mailbox] = {}
        self._messages: deque[Callable[[], None]] = deque()
        """Messages from the engine's thread that the event loop has not handled, in order."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._draining = False
        self._check_is_planned = False
        self._num_reserved = 0
        self._states = RequestStates()
        self._counts = RequestCounters()

    def observe(self, observer: Observer) -> None:
        """Call `observer` for all further events. There is one observer; a second call, from a
        second app over the same engine, replaces the first."""
        self._observer = observer

    def warm_workers(self) -> None:
        """Start the processes for grammars and chat templates in the background; otherwise the
        first that needs one waits for it."""
        self._input_processor.warm()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted: started, not closed, and the engine has not died."""
        return not self._closed and self.engine_client.is_alive

    @property
    def is_ready(self) -> bool:
        """Whether the engine would work on a request that is sent now; implies `is_alive`."""
        return self.is_alive and not self._draining and self.engine_client.is_ready

    @property
    def is_live(self) -> bool:
        """Whether it is alive and does not hang: with open requests, the engine is not silent."""
        return self.is_alive and not (self.num_open > 0 and self.engine_client.is_silent)

    @property
    def is_ending(self) -> bool:
        """Whether no further request will ever be accepted, because it drains or is closed."""
        return self._draining or self._closed

    @property
    def num_open(self) -> int:
        """Number of requests whose streams are open."""
        return len(self._mailboxes)

    @property
    def num_reserved(self) -> int:
        """Number of places held for requests that are being made."""
        return self._num_reserved

    @property
    def num_waiting(self) -> int:
        """Number of requests without a seat: those of the engine, of which others may be some."""
        of_engine = self.engine_client.stats().gauges.num_waiting
        return max(self._states.count("waiting"), of_engine)

    def drain(self) -> None:
        """Refuse further requests and finish those that are open."""
        self._draining = True

    async def start(self) -> None:
        """Start the engine; once."""
        self._loop = asyncio.get_running_loop()
        self.engine_client.start(self._deliver, self._died)

    async def close(self) -> None:
        """End open requests with an error, then stop the engine. Further requests are refused."""
        self._end(EngineDeadError("the server is shutting down"))
        await asyncio.to_thread(self.engine_client.stop)
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
    ) -> Steps[list[int]]:
        """The token ids of a conversation; see `Tokenizer.chat_prompt`."""
        _, ids = yield from self.tokenizer.chat_prompt(messages, **template_arguments)
        return ids

    def refusal(self) -> OverloadedError | None:
        """The error for one more request if the queue is full, which is then counted as refused;
        None if there is room for one with a short prompt, or if the engine is not running."""
        error = self._capacity_error((1,))
        if not isinstance(error, OverloadedError):
            return None
        self._counts.num_requests_refused += 1
        return error

    @contextmanager
    def reserved(self, count: int) -> Iterator[Reservation]:
        """Hold places for `count` requests while they are made, so that a refused request costs no
        work.

        A place is held until a request takes it over (`Reservation.enter`) or the block is left.
        Raises `OverloadedError` or `EngineDeadError`, like `stream`.
        """
        self._check_capacity((1,) * count)
        self._num_reserved += count
        reservation = Reservation(count, self._take_over, self._check_waiting_tokens)
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
        """Run a request; returns its stream, which the caller must close (`stream` does both).

        `merge=False` keeps one piece per token for a slow reader too. Raises `OverloadedError` if
        the queue is full, `EngineDeadError` if the engine is not running or the server shuts down.
        """
        self._check_capacity((len(request.prompt_token_ids),))
        if request.request_id in self._mailboxes:
            raise ValueError(f"a request with id {request.request_id!r} is already running")
        mailbox = Mailbox(OutputProcessor(request, self.tokenizer), merge, self._mailbox_limits)
        self._mailboxes[request.request_id] = mailbox
        self._counts.num_requests_admitted += 1
        state = self._states.add(request.request_id, len(request.prompt_token_ids))
        if self._observer is not None:
            self._observer.entered(request, state)
        self.engine_client.add(request)
        return RequestStream(request, mailbox, partial(self._leave, request.request_id))

    def _leave(self, request_id: str) -> None:
        mailbox = self._mailboxes.pop(request_id)
        self._states.remove(request_id)
        reason = mailbox.processor.finish_reason
        if reason is None:
            self.engine_client.abort(request_id)
        self._counts.count_end(end_of(None if mailbox.is_cancelled else reason).counter)
        if self._observer is not None:
            self._observer.left(request_id, reason)

    @asynccontextmanager
    async def stream(
        self, request: Request, *, merge: bool = True
    ) -> AsyncIterator[AsyncIterator[TextDelta]]:
        """Run a request; yields an iterator over its pieces. Leaving the block aborts an unfinished
        request. Raises the errors of `enter`."""
        with closing(self.enter(request, merge=merge)) as running:
            yield aiter(running)

    def cancel(self, request_id: str, error: RequestError) -> None:
        """End a request now with `error`, which its reader gets. Unknown ids are ignored."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None and mailbox.processor.finish_reason is None:
            mailbox.cancel()
            mailbox.fail(error)
            self.engine_client.abort(request_id)

    async def generate(self, request: Request) -> RequestOutput:
        """Run a request to its end; cancelling the task aborts it.

        Raises what `enter` raises, and what `RequestStream.output` raises.
        """
        return await self.enter(request).output()

    def stats(self) -> dict[str, Any]:
        """Statistics of engine and façade by name: those of `types.stats_summary`, then all gauges
        and counters."""
        stats = self.read_stats()
        return {**stats.summary(), **stats.by_name()}

    def read_stats(self) -> ServingStats:
        """The same as a record."""
        limits = self._input_processor.limits
        return ServingStats(self.engine_client.stats(), copy(self._counts), limits, self.num_open)

    def stats_of_replicas(self) -> Mapping[str, EngineStats]:
        """The statistics of each engine by name, where engines have names; see `EngineClient`."""
        return self.engine_client.stats_of_replicas()

    def ready_replicas(self) -> frozenset[str]:
        """Names of those of these engines that work on requests now."""
        return self.engine_client.ready_replicas()

    def snapshot(self) -> dict[str, OpenRequest]:
        """What waits for the readers of the open requests, by request id."""
        return {name: mailbox.snapshot() for name, mailbox in self._mailboxes.items()}

    def _capacity_error(
        self, prompt_lengths: Sequence[int]
    ) -> EngineDeadError | OverloadedError | None:
        """The error for further requests with prompts of these lengths in tokens; a length that is
        not known is 1."""
        num_taken = len(self._mailboxes) + self._num_reserved
        if not self.is_alive:
            return EngineDeadError("the engine is not running")
        if self._draining:
            return EngineDeadError("the server is shutting down")
        if num_taken + len(prompt_lengths) > self._input_processor.limits.max_unfinished:
            busy = f"the server is busy: {num_taken} requests are running or waiting"
            return OverloadedError(busy)
        return self._waiting_tokens_error(prompt_lengths)

    def _waiting_tokens_error(self, prompt_lengths: Sequence[int]) -> OverloadedError | None:
        return waiting_tokens_error(self._input_processor.limits, self._states, prompt_lengths)

    def _check_capacity(self, prompt_lengths: Sequence[int]) -> None:
        self._refuse_with(self._capacity_error(prompt_lengths), len(prompt_lengths))

    def _check_waiting_tokens(self, prompt_lengths: Sequence[int]) -> None:
        self._refuse_with(self._waiting_tokens_error(prompt_lengths), len(prompt_lengths))

    def _refuse_with(self, error: EngineDeadError | OverloadedError | None, count: int) -> None:
        if error is None:
            return
        self._counts.num_requests_refused += count
        try:
            raise error
        finally:
            del error  # it would hold this frame, and the frame it, until a full collection

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
        folded = self._states.stepped(outputs, step_events)
        if self._observer is not None:
            self._observer.stepped(folded)
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            processor = mailbox.processor
            try:
                piece = processor.push(output)
            except Exception:
                log.exception("request %s: its output cannot be decoded", output.request_id)
                mailbox.fail(EngineError("the output of this request cannot be decoded as text"))
                self.engine_client.abort(output.request_id)
                continue
            if piece is not None:
                mailbox.put(piece)
                is_behind = is_behind or mailbox.num_bytes > 0
                is_full = is_full or mailbox.num_bytes > self._mailbox_limits.max_bytes
            if processor.take_abort():
                self.engine_client.abort(output.request_id, FinishReason.STOP)
        if is_full:  # checked after its reader has had a chance to run
            asyncio.get_running_loop().call_soon(self._cancel_stalled)
        elif is_behind and not self._check_is_planned:
            self._check_is_planned = True
            asyncio.get_running_loop().call_later(_CHECK_INTERVAL_S, self._cancel_stalled)

    def _cancel_stalled(self) -> None:
        """Cancel requests with too many unread bytes, alone or together with all others."""
        self._check_is_planned = False
        num_bytes = sum(waiting.num_bytes for waiting in self._mailboxes.values())
        for request_id, mailbox in sorted(
            self._mailboxes.items(), key=lambda item: item[1].num_bytes, reverse=True
        ):
            if num_bytes > self._mailbox_limits.max_bytes_in_all:
                num_bytes -= mailbox.num_bytes
                mailbox.drop()
            elif mailbox.num_bytes <= self._mailbox_limits.max_bytes:
                return
            message = "the client reads too slowly: too much of the answer was waiting to be read"
            self.cancel(request_id, CancelledError(message, code="client_stalled"))


def waiting_tokens_error(
    limits: EngineLimits, states: RequestStates, prompt_lengths: Sequence[int]
) -> OverloadedError | None:
    """The error for further requests with prompts of these lengths in tokens; None if they may
    wait. The scheduler would refuse them; here they have cost the engine nothing. `states`: of the
    requests that it has. Those for whom seats are free do not count."""
    if limits.max_waiting_tokens is None:
        return None
    waiting, num_seated = states.waiting(), states.count("running", "preempted")
    free = limits.num_seats - num_seated
    if limits.batching_mode == "static" and num_seated:
        free = 0  # nobody joins a batch that runs
    added = sum(prompt_lengths[max(0, free - len(waiting)) :])
    if not added:
        return None
    num_tokens = states.num_tokens("waiting") - sum(islice(waiting.values(), max(0, free)))
    if num_tokens + added <= limits.max_waiting_tokens:
        return None
    return too_many_tokens(num_tokens, added, limits.max_waiting_tokens)
