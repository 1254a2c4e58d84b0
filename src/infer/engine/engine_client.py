"""`EngineClient`: the interface of an engine for the asyncio façade

It has two implementations: `engine.loop.EngineThread` for tests and programs, and
`replicas.fleet.Fleet` for `infer serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from infer.types import FinishReason, Request, StepOutput
from infer.types.engine_stats import EngineStats
from infer.types.step_events import StepEvents

HEARTBEAT_S = 1.0
"""Interval in seconds at which an idle engine reports."""
SOFT_LIMIT_S = 10.0
"""Seconds without a report after which an engine counts as hanging or very slow: it is not ready
and, if requests are open, not live."""

Deliver = Callable[[list[StepOutput], StepEvents | None], None]
"""Called with a step's outputs and its events (None if there were none)."""


class EngineClient(Protocol):
    """The interface of an engine for its façade: commands in, outputs out."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted; they may wait until the engine is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine works on requests now."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not reported for `SOFT_LIMIT_S`, or the limit that it was made with."""

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last report; 0 while another engine is started. An engine
        reports after each step, and every `HEARTBEAT_S` while idle."""

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """Start the engine; once. A thread of the engine calls `deliver` with each step's outputs,
        and `died` if the engine ends for good without having been stopped."""

    def add(self, request: Request) -> None:
        """Send a request; a refusal comes back as an output with an error."""

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Send an abort; it is applied before the next step."""

    def stop(self) -> None:
        """Finish the current step, then end; unfinished requests are dropped."""

    def stats(self) -> EngineStats:
        """Gauges of the current engine, and counters summed over all engines since the start."""

    def stats_of_replicas(self) -> Mapping[str, EngineStats]:
        """The same of each engine by its name, where engines have names: `StepEvents.replica`;
        otherwise empty."""

    def ready_replicas(self) -> frozenset[str]:
        """Names of those of these engines that work on requests now."""
