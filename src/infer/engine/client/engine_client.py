"""`EngineClient`: what the asyncio façade asks of an engine, wherever that runs.

`engine.loop.EngineThread` is one for tests and programs, `engine.process.supervisor.EngineProcess`
the one under `infer serve`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from infer.types import FinishReason, Request, StepOutput
from infer.types.engine_stats import EngineStats
from infer.types.step_events import StepEvents

HEARTBEAT_S = 1.0
"""seconds between two reports of an engine that has nothing to do"""
SOFT_LIMIT_S = 10.0
"""seconds without a report after which an engine is not ready, nor live if requests are open"""

Deliver = Callable[[list[StepOutput], StepEvents | None], None]
"""takes the outputs of a step, and what happened in it (None = nothing)"""


class EngineClient(Protocol):
    """An engine from outside: commands in, outputs out."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken (they may have to wait until it is ready)."""

    @property
    def is_ready(self) -> bool:
        """Whether it works now."""

    @property
    def silence_s(self) -> float:
        """Seconds since its last report; it reports each step and each `HEARTBEAT_S`. 0 while no
        engine works."""

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """Begin to work. From a thread of the engine, `deliver` is called with each step's
        outputs, and `died` if it ends for good though nobody has stopped it."""

    def add(self, request: Request) -> None:
        """Send a request; a refusal comes back as an output with an error."""

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Send an abort; it is applied before the next step."""

    def stop(self) -> None:
        """Finish the step that runs, then end; whatever was in flight is dropped."""

    def stats(self) -> EngineStats:
        """Gauges of the engine that works, counters of all engines until now."""
