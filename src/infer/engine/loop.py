"""`EngineLoop`: an `EngineCore` driven by commands; `EngineThread`: that loop in a thread

Commands go in through a queue and are applied between steps; outputs come back as one list per
step. Nothing else is shared. `EngineThread` is the `EngineClient` of tests and programs; under
`infer serve` the loop runs in `replicas.child`. An exception that leaves the loop ends the
engine, and the `died` callback is called.
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

from infer.engine.commands import Abort, Add, Command, FollowPages, Reset, Stop
from infer.engine.core import EngineCore
from infer.engine.engine_client import HEARTBEAT_S, SOFT_LIMIT_S, Deliver
from infer.errors import RequestError
from infer.text.checkpoint_text import TextFiles
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

Announce = Callable[[str | None], None]
"""Called with the id of the request that has an isolated step next; see `EngineCore`."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything about an engine that is known before its weights are loaded."""

    model_name: str
    """Name under which the model is served."""
    files: TextFiles
    """Tokenizer and chat templates."""
    build: Callable[[Announce], tuple[EngineCore, EngineLimits]]
    """Loads the weights and makes the engine; raises `LoadError` or `ConfigError`."""
    pinned: Callable[[EngineCore], dict[str, Any]] = lambda core: {}
    """Settings that were derived from the machine's state when the engine was built, and that an
    engine which replaces it must get as they are."""
    fingerprint: Callable[[EngineCore], Fingerprint] = lambda core: Fingerprint()
    """Which model the engine serves and which bits it computes; called once, before requests."""


def freeze_heap() -> None:
    """Exclude all objects that exist now from garbage collection; called before work begins.

    They stay until the process ends, and traversing them all would stop the process for 0.1 s.
    """
    gc.collect()
    gc.freeze()
    # A full collection is due when the number of new objects exceeds a quarter of those that
    # survived the last one. Now almost none survive, so the next one comes soon and is short.
    gc.collect()


class EngineLoop:
    """Applies commands, steps and sends outputs, until it is stopped."""

    def __init__(
        self,
        core: EngineCore,
        send: Deliver,
        commands: queue.SimpleQueue[Command],
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        """`send` is called after each step, and with an empty list every `HEARTBEAT_S` while
        idle. `on_reset` is called when a `Reset` has ended all requests."""
        self._on_reset = on_reset
        self._commands = commands
        self._core = core
        self._send = send
        self._refused: list[StepOutput] = []
        self.num_applied = 0
        """Commands that have been applied since the start or the last `Reset`."""

    def run(self) -> None:
        """Work until a stop command; called once."""
        while self._take_commands():
            outputs, self._refused = self._refused, []
            if self._core.has_work:
                outputs += self._core.step()
                step_events = self._core.step_events
            else:
                step_events = self._core.idle_events()
            self._send(outputs, step_events)

    def _take_commands(self) -> bool:
        """Apply the commands in the queue; while there is no work, wait for one first. Returns
        False for `Stop`."""
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
        """Apply a command; returns whether the loop continues."""
        self.num_applied += 1
        match command:
            case Add(request, sent_s):
                self._add(request, sent_s)
                return True
            case Abort(request_id, reason):
                self._core.abort(request_id, reason)
                return True
            case FollowPages():
                self._core.follow_pages()
                return True
            case Reset():
                self._core.abort_all()
                self._refused.clear()
                self.num_applied = 0
                self._on_reset()
                return True
            case Stop():
                return False
            case _:
                assert_never(command)

    def _add(self, request: Request, sent_s: float | None) -> None:
        try:
            self._core.add(request, sent_s)
        except RequestError as error:
            reason = ErrorRecord.of(error)
            refusal = StepOutput(request.request_id, None, FinishReason.ERROR, error=reason)
            self._refused.append(refusal)


class EngineThread:
    """An `EngineClient` whose engine is a thread of this process."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        """The core; other threads may read it only between two steps."""
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
        """Whether the engine's thread runs."""
        return self._thread is not None and self._thread.is_alive

    @property
    def is_ready(self) -> bool:
        """Like `is_alive`: a thread is never restarted."""
        return self.is_alive

    @property
    def is_silent(self) -> bool:
        """See `EngineClient`."""
        return self.silence_s >= SOFT_LIMIT_S

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        return time.monotonic() - self._heard_s

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        self._commands.put(Add(request, time.monotonic()))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        self._commands.put(Abort(request_id, reason))

    def stop(self) -> None:
        """See `EngineClient`."""
        self._commands.put(Stop())
        if self._thread is not None:
            self._thread.stop()

    def stats(self) -> EngineStats:
        """See `EngineClient`. Each number is exact, but two of them may be from different steps."""
        return self.core.stats()

    def stats_of_replicas(self) -> dict[str, EngineStats]:
        """See `EngineClient`."""
        return {}

    def ready_replicas(self) -> frozenset[str]:
        """See `EngineClient`."""
        return frozenset()

    def _run(self, deliver: Deliver, died: Callable[[], None]) -> None:
        def send(outputs: list[StepOutput], step_events: StepEvents | None) -> None:
            self._heard_s = time.monotonic()
            if outputs or step_events:
                deliver(outputs, step_events)

        try:
            EngineLoop(self.core, send, self._commands).run()
        except BaseException:
            log.exception("the engine has died")
            died()
