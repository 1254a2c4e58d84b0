"""`EngineThread`: an `EngineCore` in a thread of its own, reached by messages only.

Commands go in through a queue and are applied between steps; outputs come back as one list per
step, through a callback that runs on the engine's thread (the owner hands it over to its own).
Nothing else is shared. An exception in a step fails the requests that were in flight, with a
message, and the engine goes on; one outside of a step ends the engine, and its owner is told.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from infer.engine.core import EngineCore
from infer.errors import RequestError
from infer.types import ErrorRecord, FinishReason, Request, StepOutput

log = logging.getLogger(__name__)

_Command = Request | str | None
"""add this request · abort this id · stop"""


class EngineThread:
    """See the module's docstring."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._deliver: Callable[[list[StepOutput]], None] | None = None
        self._died: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None

    def start(self, deliver: Callable[[list[StepOutput]], None], died: Callable[[], None]) -> None:
        """Begin to step. On the engine's thread, `deliver` is called with each step's outputs,
        and `died` if the thread ends though nobody has stopped it."""
        assert self._thread is None, "an engine is started once"
        self._deliver, self._died = deliver, died
        self._thread = threading.Thread(target=self._run, name="infer-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether there is a thread that takes commands."""
        return self._thread is not None and self._thread.is_alive()

    def add(self, request: Request) -> None:
        """Send a request; a refusal comes back as an output with an error."""
        self._commands.put(request)

    def abort(self, request_id: str) -> None:
        """Send an abort; it is applied before the next step."""
        self._commands.put(request_id)

    def stop(self) -> None:
        """Finish the step that runs, then end; whatever was in flight is dropped."""
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join()

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters; each number is exact, their set may straddle a step."""
        return self._core.stats()

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except BaseException:
            log.exception("the engine has died")
            assert self._died is not None
            self._died()

    def _step_until_stopped(self) -> None:
        while self._take_commands():
            if not self._core.has_work:
                continue
            try:
                outputs = self._core.step()
            except Exception:
                log.exception("a step failed; the requests in flight are failed")
                outputs = self._fail_all()
            self._send(outputs)

    def _send(self, outputs: list[StepOutput]) -> None:
        if outputs and self._deliver is not None:
            self._deliver(outputs)

    def _take_commands(self) -> bool:
        """Apply what has been sent; waits while there is nothing to do. False = stop."""
        wait_s = self._core.wait_s()
        try:
            command = self._commands.get(block=wait_s != 0.0, timeout=wait_s or None)
            while True:
                if command is None:
                    return False
                self._apply(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _apply(self, command: Request | str) -> None:
        if isinstance(command, str):
            self._core.abort(command)
            return
        try:
            self._core.add(command)
        except RequestError as error:
            reason = ErrorRecord.of(error)
            self._send([StepOutput(command.request_id, None, FinishReason.ERROR, error=reason)])

    def _fail_all(self) -> list[StepOutput]:
        scheduler = self._core.scheduler
        unfinished = [*scheduler.running, *scheduler.preempted, *scheduler.waiting]
        message = "the engine failed while computing this request"
        failed = [scheduler.fail(sequence.request_id, message) for sequence in unfinished]
        return [output for output in failed if output is not None]
