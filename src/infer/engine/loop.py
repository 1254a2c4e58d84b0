"""`EngineLoop`: an `EngineCore` driven by commands; `EngineThread`: that loop in a thread

Commands go in through a queue and are applied between steps; outputs come back as one list per
step. Nothing else is shared. `EngineClient` is the interface of an engine for its façade:
`EngineThread` implements it here, for tests and programs, and `engine.process.EngineProcess` under
`infer serve`. An exception that leaves the loop ends the engine, and the `died` callback is called.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from infer.engine.client.input import EngineLimits
from infer.engine.core import EngineCore
from infer.errors import RequestError
from infer.text.checkpoint_text import TextFiles
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""interval in seconds at which an idle engine reports"""
SOFT_LIMIT_S = 10.0
"""seconds without a report after which an engine counts as hanging or very slow: it is not ready
and, if requests are open, not live"""


class Abort(NamedTuple):
    """The command to end a request now."""

    request_id: str
    reason: FinishReason = FinishReason.ABORT


Command = Request | Abort | None
"""add this request · abort that one · stop (None)"""


Announce = Callable[[str], None]
"""called with the id of the request that is computed alone next; see `EngineCore`"""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything about an engine that is known before its weights are loaded."""

    model_name: str
    """name under which the model is served"""
    files: TextFiles
    """tokenizer and chat templates"""
    build: Callable[[Announce], tuple[EngineCore, EngineLimits]]
    """loads the weights and makes the engine; raises `LoadError` or `ConfigError`"""
    pinned: Callable[[EngineCore], dict[str, Any]] = lambda core: {}
    """settings that were derived from the machine's state when the engine was built, and that an
    engine which replaces it must get as they are"""


Deliver = Callable[[list[StepOutput], StepEvents | None], None]
"""called with a step's outputs and its events (None if there were none)"""


def freeze_heap() -> None:
    """Exclude all objects that exist now from garbage collection; called before work begins.

    They stay until the process ends, and traversing them all would stop the process for 0.1 s.
    """
    gc.collect()
    gc.freeze()
    # A full collection is due when the number of new objects exceeds a quarter of those that
    # survived the last one. Now almost none survive, so the next one comes soon and is short.
    gc.collect()


class EngineClient(Protocol):
    """The interface of an engine for its façade: commands in, outputs out."""

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted; they may wait until the engine is ready."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine works on requests now."""

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

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters by name."""


class EngineLoop:
    """Applies commands, steps and sends outputs, until it is stopped."""

    def __init__(
        self,
        core: EngineCore,
        send: Deliver,
        commands: queue.SimpleQueue[Command],
    ) -> None:
        """`send` is called after each step, and with an empty list every `HEARTBEAT_S` while
        idle."""
        self._commands = commands
        self._core = core
        self._send = send
        self._refused: list[StepOutput] = []

    def run(self) -> None:
        """Work until a stop command; called once."""
        while self._take_commands():
            outputs, self._refused = self._refused, []
            step_events = None
            if self._core.has_work:
                outputs += self._core.step()
                step_events = self._core.step_events
            self._send(outputs, step_events)

    def _take_commands(self) -> bool:
        """Apply the commands in the queue; while there is no work, wait for one first. Returns
        False for a stop command."""
        wait_s = self._core.wait_s()
        wait_s = HEARTBEAT_S if wait_s is None else min(wait_s, HEARTBEAT_S)
        try:
            command = self._commands.get(block=wait_s != 0.0, timeout=wait_s or None)
            while True:
                if command is None:
                    return False
                self._apply(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _apply(self, command: Request | Abort) -> None:
        if isinstance(command, Abort):
            self._core.abort(*command)
            return
        try:
            self._core.add(command)
        except RequestError as error:
            reason = ErrorRecord.of(error)
            refusal = StepOutput(command.request_id, None, FinishReason.ERROR, error=reason)
            self._refused.append(refusal)


class EngineThread:
    """An `EngineClient` whose engine is a thread of this process."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        self._heard_s = 0.0

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """See `EngineClient`."""
        assert self._thread is None, "an engine is started once"
        self._heard_s = time.monotonic()
        run = partial(self._run, deliver, died)
        self._thread = BackgroundThread(run, lambda: self._commands.put(None), "infer-engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive

    @property
    def is_ready(self) -> bool:
        """Like `is_alive`: a thread is never restarted."""
        return self.is_alive

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        return time.monotonic() - self._heard_s

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        self._commands.put(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        self._commands.put(Abort(request_id, reason))

    def stop(self) -> None:
        """See `EngineClient`."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.stop()

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters by name. Each number is exact, but two of them may be from
        different steps."""
        return {**self._core.stats(), "num_restarts": 0}

    def _run(self, deliver: Deliver, died: Callable[[], None]) -> None:
        def send(outputs: list[StepOutput], step_events: StepEvents | None) -> None:
            self._heard_s = time.monotonic()
            if outputs or step_events:
                deliver(outputs, step_events)

        try:
            EngineLoop(self._core, send, self._commands).run()
        except BaseException:
            log.exception("the engine has died")
            died()
