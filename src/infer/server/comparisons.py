"""`Comparisons`: the batching modes beside one another, computed by a process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Literal, TypeVar

from pydantic import Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import DeadlineError, EngineError, InferError
from infer.fair_queue import FairQueue
from infer.replicas.spawned import module_command, module_environment
from infer.server.http.error_responses import HttpError, describe, too_many
from infer.server.openai.events import event
from infer.server.openai.schema import Body
from infer.server.openai.schema_base import WHOLE
from infer.server.openai.streaming import STREAM_HEADERS, unless_gone

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_RUNNING = 2
"""Comparisons of different keys that run at the same time."""
MAX_OF_KEY = 1
"""Comparisons of one key that run or wait."""
MAX_S = 120.0
"""Seconds after which a comparison is ended."""
MAX_BYTES = 32 * 1024 * 1024
"""Bytes of an answer."""
COMMAND = tuple(module_command("infer.bench.comparison"))
_RETRY_S = 10


class ComparisonBody(Body):
    """`POST /v1/engine/comparisons`."""

    workload: Literal["mixed", "equal", "long_tail"] = "mixed"
    seats: Annotated[int, Field(ge=1, le=64), WHOLE] = 8
    num_requests: Annotated[int, Field(ge=1, le=128), WHOLE] = 64
    stream: bool = False
    """Whether the recordings are told as events while they are computed."""


class Comparisons:
    """The process (`infer.bench.comparison`) has the lowest priority and loads the model that
    ships. A key has one at a time. Two run, never both of one key; those of further keys wait for
    their turn. None begins while requests wait, and it ends with its client or after `MAX_S`. What
    the process writes, one JSON object or events, goes to the client as it is. Lives on the event
    loop."""

    def __init__(
        self, engine: AsyncLLM, max_s: float = MAX_S, command: Sequence[str] = COMMAND
    ) -> None:
        """`command` gets workload, seats and requests as further arguments."""
        self._engine = engine
        self._max_s = max_s
        self._command = command
        self._turns: FairQueue[asyncio.Future[None]] = FairQueue(MAX_RUNNING)

    async def run(self, body: ComparisonBody, owner: str = "") -> bytes:
        """All that `pieces` yields."""
        async with aclosing(self.pieces(body, owner)) as pieces:
            return b"".join([piece async for piece in pieces])

    async def pieces(self, body: ComparisonBody, owner: str = "") -> AsyncGenerator[bytes]:
        """Yield the comparison as JSON, or as events; closing ends the process. `owner`: id of the
        key. Raises `HttpError`: 429 while another one of the key runs or waits, 503 while one runs
        and there are no keys, or requests wait; `DeadlineError`, and `EngineError` if it fails."""
        if self._turns.num_open(owner) >= MAX_OF_KEY:
            if owner:
                raise too_many(f"this key may have {MAX_OF_KEY} comparison running", _RETRY_S)
            raise _busy("another comparison is running", "comparison_running")
        async with self._turn_of(owner):
            stats, num_seats = self._engine.read_stats(), self._engine.num_seats
            if stats.engine.gauges.num_waiting or stats.num_open > num_seats:
                raise _busy("requests are waiting, and a comparison would take their time", "busy")
            async with aclosing(self._computed(body)) as pieces:
                async for piece in pieces:
                    yield piece

    @asynccontextmanager
    async def _turn_of(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the block ends."""
        turn = asyncio.get_running_loop().create_future()
        self._turns.put(owner, turn)
        try:
            self._start_turns()
            await turn
            yield
        finally:
            if turn.cancelled():
                self._turns.remove(owner, turn)
            else:
                self._turns.done(owner)
            self._start_turns()

    def _start_turns(self) -> None:
        while (taken := self._turns.take()) is not None:
            owner, turn = taken
            if turn.cancelled():
                self._turns.done(owner)
            else:
                turn.set_result(None)

    async def _computed(self, body: ComparisonBody) -> AsyncGenerator[bytes]:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *(body.workload, str(body.seats), str(body.num_requests)),
            *(["events"] if body.stream else []),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=module_environment(),
            start_new_session=True,  # the end of a terminal ends the server, and that ends this
        )
        assert process.stdout is not None
        ends_s, num_bytes = asyncio.get_running_loop().time() + self._max_s, 0
        try:
            while data := await _before(ends_s, process.stdout.read(1 << 18)):
                num_bytes += len(data)
                if num_bytes > MAX_BYTES:
                    raise EngineError("the comparison's answer does not end")
                yield data
            code = await _before(ends_s, process.wait())
        except TimeoutError:
            message = f"the comparison was not done after {self._max_s:g} s"
            raise DeadlineError(message, code="deadline_exceeded") from None
        finally:
            if process.returncode is None:
                process.kill()
                while await process.stdout.read(1 << 18):
                    pass
                await process.wait()
                await asyncio.sleep(0)  # in which the loop closes what it had of it
        if code:
            log.error("the comparison has ended with exit code %d", code)
            raise EngineError("the comparison has failed")


class ComparisonEvents(Response):
    """A `Response` only in that Starlette calls it: a comparison's events, from the first one on.
    What goes wrong later is the last event."""

    def __init__(self, first: bytes, pieces: AsyncGenerator[bytes]) -> None:
        """`pieces`: those behind `first`; closed here."""
        super().__init__()
        self._first = first
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces):
            await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except InferError as error:
            body = event(bytes(describe(error).body).decode("ascii"), "error")
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _before(time_s: float, work: Awaitable[T]) -> T:
    """The result of `work`; raises `TimeoutError` at a time of the loop's clock."""
    async with asyncio.timeout_at(time_s):
        return await work


def _busy(message: str, code: str) -> HttpError:
    return HttpError(503, message, code=code, type="overloaded_error", retry_after_s=_RETRY_S)
