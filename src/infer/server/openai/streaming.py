"""`EventStream`: the response that carries a streamed answer; and how handlers wait.

The engine's streams run before the status line is sent (so a full queue is still a 503) and are
closed however the response ends (so a client's leaving aborts). An error after the first byte
becomes the last event, without `[DONE]`; but if only the session could not be written, the end of
the stream follows. Starlette does not cancel a handler whose client has left, and uvicorn only
tells those who ask; so every handler that waits for the engine does it inside `unless_gone`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.engine.client.async_llm import RequestStream
from infer.errors import EngineError, InferError
from infer.server.http.error_responses import ClientGone, describe, log
from infer.server.openai.answer_parts import wire_reason
from infer.server.openai.generating_api import StreamFormat
from infer.server.openai.large_json import LARGE_ANSWER_BYTES
from infer.types import TextDelta

T = TypeVar("T")
Render = Callable[..., Awaitable[Any]]
"""`Offload.render` of one request: bytes of what is written, the function that writes, arguments"""

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
"""headers of a stream of events; the last one keeps nginx from collecting it"""


class EventStream(Response):
    """A `Response` only in that Starlette calls it. Choices are written as they come."""

    def __init__(
        self,
        running: Sequence[RequestStream],
        events: StreamFormat,
        render: Render,
        keep_alive_s: float = 0.0,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`running`: one for each choice; closed here. `render` writes what is large.
        `keep_alive_s`: a comment is sent whenever nothing was for so long; 0 = never. `keep` is
        awaited when the answer is whole, before the client gets its end."""
        super().__init__()
        self._running = running
        self._events = events
        self._render = render
        self._writing = asyncio.Lock()
        self._keep_alive_s = keep_alive_s
        self._keep = keep
        self._written_s = 0.0
        self._num_bytes = 0
        """bytes written since others have had a turn"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as stack:
            for stream in self._running:
                stack.enter_context(closing(stream))
            await unless_gone(receive, self._deliver(send))

    async def _deliver(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        try:
            await self._write(send, self._events.opening())
            works = all_of(self._follow(i, each, send) for i, each in enumerate(self._running))
            await beside(works, self._keep_alive(send))
            await self._keep_turn(send)
            await self._write(send, self._events.closing())
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, InferError):
                log.exception("a stream failed")
            await self._write(send, [self._failure(error)])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_turn(self, send: Send) -> None:
        """Keep the turn of a session. If that fails, the client gets an error, and then the end of
        the stream as always: the answer is whole."""
        if self._keep is not None:
            try:
                await self._keep()
            except InferError as error:
                await self._write(send, [self._failure(error)])

    def _failure(self, error: Exception) -> bytes:
        return self._events.failure(bytes(describe(error).body).decode("ascii"))

    async def _follow(self, index: int, stream: AsyncIterable[TextDelta], send: Send) -> None:
        async for delta in stream:
            if delta.finish_reason is not None:
                wire_reason(delta.finish_reason, delta.error)  # raises where it was broken off
            async with self._writing:
                await self._write(send, await self._piece(index, delta))
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

    async def _keep_alive(self, send: Send) -> None:
        """Comments keep proxies from closing what waits, and notice clients that are gone. They
        come no sooner: a load generator counts what it cannot read as a failure."""
        loop, wait_s = asyncio.get_running_loop(), self._keep_alive_s
        while wait_s:
            await asyncio.sleep(wait_s)
            wait_s = self._written_s + self._keep_alive_s - loop.time()
            if wait_s <= 0:
                async with self._writing:
                    await self._write(send, [self._events.waiting()])
                wait_s = self._keep_alive_s

    async def _write(self, send: Send, events: Iterable[bytes]) -> None:
        self._written_s = asyncio.get_running_loop().time()
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})


def _all(piece: Callable[..., Iterable[bytes]], *arguments: Any) -> list[bytes]:
    return list(piece(*arguments))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client leaves first, `work` is cancelled: `ClientGone`.

    The request's body must have been read, because this takes the messages behind it.
    """
    return await beside(work, _disconnect(receive))


async def beside(work: Coroutine[Any, Any, T], company: Coroutine[Any, Any, None]) -> T:
    """The result of `work`; `company` runs meanwhile, and may end it by raising."""
    working, other = asyncio.ensure_future(work), asyncio.ensure_future(company)
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
