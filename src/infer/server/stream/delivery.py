"""`EventStream`: the response that carries one streamed answer from the engine to the socket.

Its life is the engine streams' life: they are entered before the status line is sent (so a full
queue is still a 503) and left however it ends (so a client's leaving aborts). Choices are written
as they come, one event per write. An error after the first byte becomes the last event, and the
stream closes without `[DONE]`. A reader that takes nothing for `WRITE_STALL_S` counts as gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.errors import EngineError, InferError
from infer.server import waiting
from infer.server.answer import check_ended_well
from infer.server.failures import ClientGone, describe
from infer.server.limits import WRITE_STALL_S
from infer.server.stream.chunks import Renderer
from infer.types import Request, TextDelta

if TYPE_CHECKING:
    from infer.engine.async_llm import AsyncLLM

log = logging.getLogger("infer.server")

_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
}


class EventStream(Response):
    """See the module's docstring. A `Response` only in that Starlette calls it."""

    def __init__(self, engine: AsyncLLM, requests: Sequence[Request], renderer: Renderer) -> None:
        super().__init__()
        self._engine = engine
        self._requests = requests
        self._renderer = renderer
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as stack:
            streams = [
                await stack.enter_async_context(
                    self._engine.stream(request, merge=self._renderer.merges)
                )
                for request in self._requests
            ]
            await waiting.unless_gone(receive, self._deliver(streams, send))

    async def _deliver(self, streams: Sequence[AsyncIterator[TextDelta]], send: Send) -> None:
        await send(dict(_START))
        try:
            await self._write(send, self._renderer.opening())
            if len(streams) == 1:
                await self._follow(0, streams[0], send)
            else:
                await waiting.all_of(
                    self._follow(index, stream, send) for index, stream in enumerate(streams)
                )
            await self._write(send, self._renderer.closing())
        except ClientGone:
            raise
        except Exception as error:
            if not isinstance(error, InferError):
                log.exception("a stream failed")
            await self._write(send, [self._renderer.failure(describe(error))])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, index: int, stream: AsyncIterator[TextDelta], send: Send) -> None:
        async for delta in stream:
            if delta.finish_reason is not None:
                check_ended_well(delta.finish_reason, delta.error)
            async with self._writing:
                await self._write(send, self._renderer.piece(index, delta))
            if delta.finish_reason is not None:
                return
        raise EngineError("the engine's stream ended before the answer did")

    async def _write(self, send: Send, events: Iterable[bytes]) -> None:
        for event in events:
            try:
                async with asyncio.timeout(WRITE_STALL_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except (TimeoutError, OSError):
                raise ClientGone from None
