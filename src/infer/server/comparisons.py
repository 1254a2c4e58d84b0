"""`Comparisons`: the batching modes beside one another, computed by a process of its own.

The process (`infer.bench.comparison`) has the lowest priority and loads the model that ships. There
is one at a time, none begins while requests wait, and it ends with its client or after `MAX_S`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import DeadlineError, EngineError
from infer.server.http.error_responses import HttpError
from infer.server.openai.schema import Body
from infer.server.openai.schema_base import WHOLE

log = logging.getLogger(__name__)

MAX_S = 120.0
"""seconds after which a comparison is ended"""
MAX_BYTES = 32 * 1024 * 1024
"""bytes of an answer"""
COMMAND = (sys.executable, "-m", "infer.bench.comparison")
_RETRY_S = 10


class ComparisonBody(Body):
    """`POST /v1/engine/comparisons`."""

    workload: Literal["mixed", "equal", "long_tail"] = "mixed"
    seats: Annotated[int, Field(ge=1, le=64), WHOLE] = 8
    num_requests: Annotated[int, Field(ge=1, le=128), WHOLE] = 64


class Comparisons:
    """See the module's docstring. Lives on the event loop."""

    def __init__(
        self, engine: AsyncLLM, max_s: float = MAX_S, command: Sequence[str] = COMMAND
    ) -> None:
        """`command` gets workload, seats and requests as further arguments."""
        self._engine = engine
        self._max_s = max_s
        self._command = command
        self._is_running = False

    async def run(self, body: ComparisonBody) -> bytes:
        """The comparison as JSON; cancelling it ends the process. Raises `HttpError` (503) while
        another one runs or requests wait, `DeadlineError`, and `EngineError` if it fails."""
        if self._is_running:
            raise _busy("another comparison is running", "comparison_running")
        stats, num_seats = self._engine.read_stats(), self._engine.num_seats
        if stats.engine.gauges.num_waiting or stats.num_open > num_seats:
            raise _busy("requests are waiting, and a comparison would take their time", "busy")
        self._is_running = True
        try:
            return await self._computed(body)
        finally:
            self._is_running = False

    async def _computed(self, body: ComparisonBody) -> bytes:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *(body.workload, str(body.seats), str(body.num_requests)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # the end of a terminal ends the server, and that ends this
        )
        assert process.stdout is not None
        answer = bytearray()
        try:
            async with asyncio.timeout(self._max_s):
                while data := await process.stdout.read(1 << 18):
                    answer += data
                    if len(answer) > MAX_BYTES:
                        raise EngineError("the comparison's answer does not end")
                code = await process.wait()
        except TimeoutError:
            message = f"the comparison was not done after {self._max_s:g} s"
            raise DeadlineError(message, code="deadline_exceeded") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if code:
            log.error("the comparison has ended with exit code %d", code)
            raise EngineError("the comparison has failed")
        return bytes(answer)


def _busy(message: str, code: str) -> HttpError:
    return HttpError(503, message, code=code, type="overloaded_error", retry_after_s=_RETRY_S)
