"""`EventStream`: the response that carries a streamed answer; and how handlers wait.

The engine's streams run before the status line is sent (so a full queue is still a 503) and are
closed however the response ends (so a client's leaving aborts, unless the answer is kept for it:
then the handler goes on to the end of the answer). An error after the first byte
becomes the last event, without `[DONE]`; but if only the session could not be written, the end of
the stream follows. Starlette does not cancel a handler whose client has left, and uvicorn only
tells those who ask; so every handler that waits for the engine does it inside `unless_gone`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.engine.client.async_llm import RequestStream
from infer.errors import EngineError, InferError
from infer.server.http.error_responses import ClientGone, describe, log
from infer.server.openai.answer_parts import wire_reason
from infer.server.openai.events import NOTHING_YET
from infer.server.openai.generating_api import StreamFormat
from infer.server.openai.large_json import LARGE_ANSWER_BYTES
from infer.types import TextDelta

T = TypeVar("T")
Render = Callable[..., Awaitable[Any]]
"""`Offload.render` of one request: bytes of what is written, the function that writes, arguments.
"""

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
"""Headers of a stream of events. With `no-transform` nobody compresses it, which some do only when
they have enough of it; the last one keeps nginx from collecting it."""


class Sink(Protocol):
    """Where the events of a stream go."""

    async def put(self, event: bytes) -> None:
        """An event of the answer."""

    async def mention(self, event: bytes) -> None:
        """What says that the stream lives, and nothing of the answer."""


class Source(Protocol):
    """Where a stream of events comes from, that others write."""

    async def take(self) -> bytes | None:
        """What is new, as one piece; None after the end."""


class Kept(Sink, Protocol):
    """An answer that outlives its connection."""

    def first_reader(self) -> AbstractContextManager[Source]:
        """All of it, as long as the block lasts."""

    def end(self) -> None:
        """There are no further events."""


class ToldStatus(Protocol):
    """Why a stream is silent."""

    def as_comment(self) -> bytes:
        """For clients that did not ask for events."""

    def as_event(self, answer_id: str) -> bytes:
        """For those that did."""


@dataclass(frozen=True, kw_only=True)
class StreamOfAnswer:
    """What `EventStream` does beside writing the events of an answer."""

    keep_alive_s: float = 0.0
    """The API's sign that it lives is sent whenever nothing was for so long; 0 = never."""
    keep_turn: Callable[[], Awaitable[None]] | None = None
    """Awaited when the answer is whole, before the client gets its end."""
    status: Callable[[], ToldStatus | None] = lambda: None
    """Why it is silent, if that is known."""
    status_for: str = ""
    """Id of the answer, for events that tell the status; "": the client has not asked for them."""
    status_s: float = 1.0
    """Seconds of silence after which it is told, and between two times."""
    kept: Kept | None = None
    """What its client may read again; then the answer goes on when the connection is lost."""


class EventStream(Response):
    """A `Response` only in that Starlette calls it. Choices are written as they come."""

    def __init__(
        self,
        running: Sequence[RequestStream],
        events: StreamFormat,
        render: Render,
        options: StreamOfAnswer = StreamOfAnswer(),
    ) -> None:
        """`running`: one for each choice; closed here. `render` writes what is large."""
        super().__init__()
        self._running = running
        self._events = events
        self._render = render
        self._options = options
        self._writing = asyncio.Lock()
        self._written_s = 0.0
        self._told: bytes | None = None
        """The status that was told last, since the last event of the answer."""
        self._num_bytes = 0
        """Bytes written since others have had a turn."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            for stream in self._running:
                stack.enter_context(closing(stream))
            if self._options.kept is None:
                await unless_gone(receive, self._send_all(send))
            else:
                await self._keep_all(self._options.kept, receive, send)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        await self._deliver(_Sending(send))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_all(self, kept: Kept, receive: Receive, send: Send) -> None:
        """Write the answer to its end, whoever reads it; the client is its first reader."""
        with kept.first_reader() as source:
            reading = asyncio.ensure_future(_read_first(source, receive, send))
            try:
                await self._deliver(kept)
                kept.end()
                await reading
            finally:
                kept.end()
                await _end(reading)

    async def _deliver(self, sink: Sink) -> None:
        try:
            await self._write(sink, self._events.opening())
            works = all_of(self._follow(i, stream, sink) for i, stream in enumerate(self._running))
            await run_while(works, self._say_it_lives(sink))
            await self._keep_turn(sink)
            await self._write(sink, self._events.closing())
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, InferError):
                log.exception("a stream failed")
            await self._write(sink, self._failure(error))

    async def _keep_turn(self, sink: Sink) -> None:
        """Keep the turn of a session. If that fails, the client gets an error, and then the end of
        the stream as always: the answer is whole."""
        if self._options.keep_turn is not None:
            try:
                await self._options.keep_turn()
            except InferError as error:
                await self._write(sink, self._failure(error))

    def _failure(self, error: Exception) -> Iterable[bytes]:
        return self._events.failure(bytes(describe(error).body).decode("ascii"))

    async def _follow(self, index: int, stream: AsyncIterable[TextDelta], sink: Sink) -> None:
        async for delta in stream:
            if delta.finish_reason is not None:
                wire_reason(delta.finish_reason, delta.error)  # raises where it was broken off
            async with self._writing:
                await self._write(sink, await self._piece(index, delta))
            if delta.finish_reason is not None:
                return
        raise EngineError("the engine's stream ended before the answer did")

    async def _piece(self, index: int, delta: TextDelta) -> Iterable[bytes]:
        """Where hundreds of choices have log-probabilities, a step of them is a long time."""
        num_bytes = self._events.size_of(delta)
        self._num_bytes += num_bytes
        if self._num_bytes > LARGE_ANSWER_BYTES:
            self._num_bytes = 0
            await asyncio.sleep(0)
        events: list[bytes] = await self._render(num_bytes, _all, self._events.piece, index, delta)
        return events

    async def _say_it_lives(self, sink: Sink) -> None:
        await all_of((self._keep_alive(sink), self._tell_status(sink)))

    async def _keep_alive(self, sink: Sink) -> None:
        """What comes keeps proxies from closing what waits, and notices clients that are gone. It
        comes no sooner: a load generator counts what it cannot read as a failure."""
        loop, wait_s = asyncio.get_running_loop(), self._options.keep_alive_s
        while wait_s:
            await asyncio.sleep(wait_s)
            wait_s = self._written_s + self._options.keep_alive_s - loop.time()
            if wait_s <= 0:
                status, lives = self._options.status(), self._events.waiting()
                async with self._writing:
                    if status is not None:
                        await sink.mention(status.as_comment())
                    if status is None or lives != NOTHING_YET:
                        await sink.mention(lives)
                    self._written_s = loop.time()
                wait_s = self._options.keep_alive_s

    async def _tell_status(self, sink: Sink) -> None:
        """Events that say why it is silent, for a client that has asked for them."""
        loop, answer_id = asyncio.get_running_loop(), self._options.status_for
        while answer_id:
            await asyncio.sleep(self._options.status_s)
            status = self._options.status()
            if status is None or loop.time() - self._written_s < self._options.status_s:
                continue
            told = status.as_event(answer_id)
            if told != self._told:
                self._told = told
                async with self._writing:
                    await sink.mention(told)

    async def _write(self, sink: Sink, events: Iterable[bytes]) -> None:
        self._written_s, self._told = asyncio.get_running_loop().time(), None
        for event in events:
            await sink.put(event)


class _Sending:
    """The sink that is a connection."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def put(self, event: bytes) -> None:
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    mention = put


class SourceStream(Response):
    """A `Response` only in that Starlette calls it: what a source gives, until one of both ends."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        while (data := await self._source.take()) is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_first(source: Source, receive: Receive, send: Send) -> None:
    """Send an answer to the client that has asked for it, as long as it is there."""
    with suppress(ClientGone):
        await SourceStream(source)({}, receive, send)


def _all(piece: Callable[..., Iterable[bytes]], *arguments: Any) -> list[bytes]:
    return list(piece(*arguments))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client leaves first, `work` is cancelled: `ClientGone`.

    The request's body must have been read, because this takes the messages behind it.
    """
    return await run_while(work, _disconnect(receive))


async def run_while(work: Coroutine[Any, Any, T], watchdog: Coroutine[Any, Any, None]) -> T:
    """The result of `work`; `watchdog` runs meanwhile, and may end it by raising."""
    working, other = asyncio.ensure_future(work), asyncio.ensure_future(watchdog)
    try:
        await asyncio.wait((working, other), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            other.result()
        return await working
    finally:
        await _end(working, other)
        del working, other  # their errors would hold this frame, and it them: a whole request


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order; the first error cancels the others and is raised itself."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(*tasks)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancels them and waits: whoever started them leaves no task behind."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
