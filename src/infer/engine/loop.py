"""`EngineLoop`: an `EngineCore` driven by commands; `EngineThread`: that loop in a thread.

Commands go in through a queue and are applied between steps; outputs come back as one list per
step. Nothing else is shared. `EngineThread` is the `EngineClient` of tests and programs; under
`infer serve` the loop runs in `engine.process.child`. An exception that gets out of the loop ends
the engine, and its owner is called.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from infer.engine.client.engine_client import HEARTBEAT_S, Deliver
from infer.engine.commands import Abort, Add, Command, Stop
from infer.engine.core import EngineCore
from infer.errors import RequestError
from infer.text.checkpoint_text import TextFiles
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

Announce = Callable[[str | None], None]
"""takes the id of the request that is computed by itself next; see `EngineCore`"""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """An engine that can be made: known before its weights are loaded, which `build` does."""

    model_name: str
    files: TextFiles
    build: Callable[[Announce], tuple[EngineCore, EngineLimits]]
    pinned: Callable[[EngineCore], dict[str, Any]] = lambda core: {}
    """settings that another engine needs to take over from this one: what was chosen by the state
    of the machine when this one was built"""


def freeze_heap() -> None:
    """Before the work begins: what has been made until now stays, so the garbage collector need not
    look at it ever again. Looking at all of it stops a process for 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.collect()  # counts what is left, so that the next time comes soon, and is short


class EngineLoop:
    """Takes commands, steps, sends; `run` is called once, by whoever gives it a thread."""

    def __init__(
        self,
        core: EngineCore,
        send: Deliver,
        commands: queue.SimpleQueue[Command],
    ) -> None:
        """`send` gets an empty list when there was nothing to do for `HEARTBEAT_S`."""
        self._commands = commands
        self._core = core
        self._send = send
        self._refused: list[StepOutput] = []

    def run(self) -> None:
        """Returns after `Stop`."""
        while self._take_commands():
            outputs, self._refused = self._refused, []
            step_events = None
            if self._core.has_work:
                outputs += self._core.step()
                step_events = self._core.step_events
            self._send(outputs, step_events)

    def _take_commands(self) -> bool:
        """Apply what has been sent; waits while there is nothing to do. False: `Stop` was sent."""
        wait_s = self._core.wait_s()
        wait_s = HEARTBEAT_S if wait_s is None else min(wait_s, HEARTBEAT_S)
        try:
            command = self._commands.get(block=wait_s != 0.0, timeout=wait_s or None)
            while self._apply(command):
                command = self._commands.get_nowait()
            return False
        except queue.Empty:
            return True

    def _apply(self, command: Command) -> bool:
        """Whether the loop goes on."""
        match command:
            case Add(request):
                self._add(request)
                return True
            case Abort(request_id, reason):
                self._core.abort(request_id, reason)
                return True
            case Stop():
                return False
            case _:
                assert_never(command)

    def _add(self, request: Request) -> None:
        try:
            self._core.add(request)
        except RequestError as error:
            reason = ErrorRecord.of(error)
            refusal = StepOutput(request.request_id, None, FinishReason.ERROR, error=reason)
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
        self._thread = BackgroundThread(run, lambda: self._commands.put(Stop()), "infer-engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether there is a thread that takes commands."""
        return self._thread is not None and self._thread.is_alive

    @property
    def is_ready(self) -> bool:
        """As `is_alive`: a thread is never restarted."""
        return self.is_alive

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        return time.monotonic() - self._heard_s

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        self._commands.put(Add(request))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        self._commands.put(Abort(request_id, reason))

    def stop(self) -> None:
        """See `EngineClient`."""
        self._commands.put(Stop())
        if self._thread is not None:
            self._thread.stop()

    def stats(self) -> EngineStats:
        """Each number is exact, their set may straddle a step."""
        return self._core.stats()

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
