"""`ProcessTransport`: the conversation with engine processes, one started whenever another dies"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec

import infer.replicas.messages as messages
from infer.engine.commands import Command, Stop
from infer.engine.engine_client import SOFT_LIMIT_S
from infer.errors import LoadError
from infer.log_fields import LOG_FIELDS
from infer.replicas.blame import was_from_outside
from infer.replicas.engine_run import STOP_S, EngineRun
from infer.replicas.spawned import Spawned
from infer.replicas.standby import Standby
from infer.replicas.supervisor_state import Lifecycle, SupervisorState
from infer.types.engine_stats import EngineCounters, EngineStats

log = logging.getLogger(__name__)

HANG_S = 120.0
"""Seconds without a report after which a process is killed; longer than any step of a large model
on a slow CPU."""
LOAD_TIMEOUT_S = 3600.0
"""Seconds after which an engine that is not ready is given up; a checkpoint may be downloaded."""
MAX_FAILURES = 5
"""Number of processes in a row without a token for any request, before the replica is failing."""
MAX_PAUSE_S = 30.0
"""Longest pause in seconds between two attempts to start a process."""
STANDBY_ANSWER_S = 5.0
"""Seconds that a standby has to say that it begins."""


_ENDED = messages.Heartbeat(
    messages.EngineHealth(EngineStats(), 0.0, 0.0, is_ready=False, is_alive=True)
)
"""Nothing comes from the process any more; `Loss` follows when it is known how it has ended."""


def _stopped_while_loading() -> LoadError:
    return LoadError("the engine was stopped while it was being loaded")


class ProcessTransport:
    """A `Transport`.

    It is a `Transport` of a `Replica`. This is the API side of the boundary; it needs no torch.
    `launch` starts the first process and raises the error that keeps it from starting. Then one
    thread reads what the process says; when the process has ended it starts the next one, or takes
    the `Standby`. Each process that serves begins a generation, and so does a `Reset`, in the same
    process. An engine that does not start is tried again after pauses that grow. After
    `MAX_FAILURES` in a row the reader gets `Failing`, and `Ready` when an engine starts.
    """

    def __init__(
        self,
        factory: str,
        settings: Mapping[str, Any],
        *,
        log_fields: Mapping[str, str] = MappingProxyType({}),
        hang_s: float = HANG_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        soft_limit_s: float = SOFT_LIMIT_S,
        max_pause_s: float = MAX_PAUSE_S,
        standby: Standby | None = None,
        standby_answer_s: float = STANDBY_ANSWER_S,
        spawned: Spawned | None = None,
    ) -> None:
        """`factory`: `module:function` that makes a `Blueprint` of `settings` in the process.
        `log_fields`: what its lines of the log carry. `standby`: where the next process comes from,
        if there is one. `spawned`: the first process, where it is started already."""
        self._standby, self._standby_answer_s = standby, standby_answer_s
        self._spawned = spawned
        self._hang_s, self._soft_limit_s = hang_s, soft_limit_s
        self._max_pause_s = max_pause_s
        self._load_timeout_s = load_timeout_s
        self._log_fields = dict(log_fields)
        """And the model's name, as soon as it is known."""
        if settings.get("served_model_name"):
            self._log_fields["model"] = settings["served_model_name"]
        level = logging.getLogger("infer").getEffectiveLevel()
        self._begin = messages.Begin(factory, dict(settings), level)
        """What the next process gets."""
        self._lock = threading.Lock()
        """Held while the state changes together with the process or with what is counted."""
        self._lifecycle = Lifecycle()
        self._engine_run: EngineRun | None = None
        """The latest process; the state says whether it takes commands."""
        self._generation = 0
        """Number of the latest generation."""
        self._num_failures = 0
        """Processes in a row that gave nobody a token."""
        self._is_pardoned = False
        self._stats = EngineStats()
        """Of the process that works."""
        self._counted = EngineCounters()
        """Sum over the processes before it."""

    # ---- the first process

    def launch(self, on_text: Callable[[messages.Text], None]) -> messages.Ready:
        """Start the first process and wait until it is ready; see `wait`."""
        self.begin()
        return self.wait(on_text)

    def begin(self) -> None:
        """Start the first process; `wait` follows, in the same thread."""
        self._lifecycle.move(SupervisorState.LOADING)
        token = LOG_FIELDS.set(self._log_fields)
        try:
            self._next_run()
        finally:
            LOG_FIELDS.reset(token)

    def wait(self, on_text: Callable[[messages.Text], None]) -> messages.Ready:
        """Wait until the first process is ready; raises the `LoadError` that keeps it from
        starting.

        `on_text` is called while it loads its weights; what it raises ends the process.
        """
        token = LOG_FIELDS.set(self._log_fields)
        try:
            return self._wait(on_text)
        finally:
            LOG_FIELDS.reset(token)

    def _wait(self, on_text: Callable[[messages.Text], None]) -> messages.Ready:
        engine_run = self._engine_run
        assert engine_run is not None, "wait follows begin"
        try:
            ready = self._greet(engine_run, on_text)
            if not self._lifecycle.move(SupervisorState.LOADED):
                raise _stopped_while_loading()
        except BaseException:
            engine_run.kill()
            engine_run.reap()
            self._lifecycle.move(SupervisorState.STOPPED)
            raise
        self._stats = ready.stats
        settings = {**self._begin.settings, **ready.settings}
        self._begin = msgspec.structs.replace(self._begin, settings=settings)
        return ready

    # ---- as a `Transport`

    def events(self) -> Generator[messages.Outward, None, None]:
        """See `Transport`; after `launch`, whose `Ready` is not repeated."""
        is_wanted = self._lifecycle.move(SupervisorState.SERVING)
        return self._events(self._engine_run if is_wanted else None)

    def send(self, generation: int, command: Command) -> None:
        """See `Transport`. There is one process at a time, and `Loss` is read between two, so a
        command for the present generation is one for the process that takes commands."""
        with self._lock:
            if (worker := self._worker) is not None:
                worker.send(generation, command)

    def pardon(self) -> None:
        """See `Transport`: the death is no failure of the engine."""
        self._is_pardoned = True

    def stats(self) -> EngineStats:
        """See `Transport`."""
        with self._lock:
            stats, counted = self._stats, self._counted
        return EngineStats(stats.gauges, counted.plus(stats.counters))

    def stop(self) -> None:
        """See `Transport`: the process ends after its current step, within `STOP_S`."""
        with self._lock:
            before, engine_run = self._lifecycle.stop(), self._engine_run
        if engine_run is None or before.is_ending:
            return
        if before.has_worker:
            engine_run.send(self._generation, Stop())
        else:
            engine_run.kill()
        if before is SupervisorState.LOADED:  # nobody reads its events
            engine_run.reap()
            self._lifecycle.move(SupervisorState.STOPPED)
        else:
            engine_run.wait(STOP_S)
            engine_run.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the process that takes commands, if there is one."""
        worker = self._worker
        return None if worker is None else worker.pid

    # ---- inside

    @property
    def _worker(self) -> EngineRun | None:
        """The process that takes commands, if there is one."""
        return self._engine_run if self._lifecycle.state.has_worker else None

    def _events(self, engine_run: EngineRun | None) -> Generator[messages.Outward, None, None]:
        LOG_FIELDS.set(self._log_fields)
        self._want_standby()
        try:
            while engine_run is not None:
                yield from self._follow(engine_run)
                engine_run = yield from self._start_again()
            self._lifecycle.move(SupervisorState.STOPPED)
        except BaseException:  # whoever reads has failed, or this has
            self._lifecycle.move(SupervisorState.DEAD)
            if self._engine_run is not None:
                self._engine_run.kill()
                self._engine_run.reap()
            raise

    def _follow(self, engine_run: EngineRun) -> Iterator[messages.Outward]:
        """What a process says until it ends; then account for its end."""
        for event in engine_run.events(self._hang_s, soft_limit_s=self._soft_limit_s):
            match event:
                case messages.Report():
                    self._stats = event.stats
                    if event.outputs:
                        self._num_failures = 0
                case messages.Ready():
                    self._generation = event.generation
            yield event
        yield _ENDED
        with self._lock:
            is_wanted = self._lifecycle.move(SupervisorState.RESTARTING)
            self._counted = self._counted.plus(self._stats.counters)
            self._stats = EngineStats()
        code = engine_run.reap()
        if not is_wanted:
            return
        if engine_run.unsent:
            log.error("a message to the engine cannot be written (%s)", engine_run.unsent)
        from_outside = was_from_outside(code, killed_by_us=engine_run.killed)
        with self._lock:
            self._counted = self._counted.plus(EngineCounters(num_restarts=1))
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        self._is_pardoned = False
        yield messages.Loss(f"the engine process has died ({how})", from_outside)
        if not self._is_pardoned:
            yield from self._count_failure()

    def _start_again(self) -> Generator[messages.Outward, None, EngineRun | None]:
        """The next process, when it takes commands; None when it is time to stop."""
        started_s = time.monotonic()
        while not self._lifecycle.wait_for_stop(self._pause_s()):
            engine_run = self._next_run()
            try:
                ready = self._greet(engine_run, lambda text: None)
                self._num_failures = min(self._num_failures, MAX_FAILURES - 1)
                with self._lock:
                    if not self._lifecycle.move(SupervisorState.SERVING):
                        raise _stopped_while_loading()
                    self._stats = ready.stats
            except LoadError as error:
                engine_run.kill()
                engine_run.reap()
                if not self._lifecycle.state.is_ending:
                    log.error("the engine cannot be started again: %s", error)
                    yield from self._count_failure()
                continue
            took_s = time.monotonic() - started_s
            log.warning("another engine process takes requests after %.1f s", took_s)
            yield ready
            self._want_standby()
            return engine_run
        return None

    def _want_standby(self) -> None:
        if self._standby is not None:
            self._standby.want()

    def _pause_s(self) -> float:
        num = self._num_failures
        return 0.0 if num < 2 else min(self._max_pause_s, 0.5 * 2.0 ** (num - 2))

    def _count_failure(self) -> Iterator[messages.Failing]:
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            self._lifecycle.move(SupervisorState.REFUSING)
            yield messages.Failing(f"the engine has failed {MAX_FAILURES} times in a row")

    def _next_run(self) -> EngineRun:
        """A process that builds its engine: the one that was started before, the standby if it
        answers, else a new one."""
        begin = msgspec.structs.replace(self._begin, generation=self._generation + 1)
        spawned, self._spawned = self._spawned, None
        if spawned is not None:
            return self._hold(EngineRun(begin, spawned))
        if self._standby is not None and (standby := self._standby.take()) is not None:
            if self._hold(standby).begin(begin, self._standby_answer_s):
                return standby
            if not self._lifecycle.state.is_ending:
                log.warning("the standby does not answer: a new process is started")
            standby.kill()
            standby.reap()
        return self._hold(EngineRun(begin))

    def _hold(self, engine_run: EngineRun) -> EngineRun:
        """Make a process that is starting one that `stop` ends."""
        with self._lock:
            self._engine_run = engine_run
            if self._lifecycle.state.is_ending:
                engine_run.kill()
        return engine_run

    def _greet(
        self, engine_run: EngineRun, on_text: Callable[[messages.Text], None]
    ) -> messages.Ready:
        """Wait until a process takes commands; raises the `LoadError` that keeps it from that."""
        for event in engine_run.events(None, load_timeout_s=self._load_timeout_s):
            match event:
                case messages.Text():
                    self._log_fields.setdefault("model", event.model_name)
                    on_text(event)
                case messages.Refused():
                    raise event.error.exception()
                case messages.Ready():
                    self._generation = event.generation
                    return event
                case messages.HasBegun() | messages.Log() | messages.Heartbeat():
                    pass
                case _:
                    raise LoadError("the engine process reports a step before it is ready")
        if self._lifecycle.state.is_ending:
            raise _stopped_while_loading()
        if engine_run.unsent:
            raise LoadError(f"the engine's settings cannot be sent to it ({engine_run.unsent})")
        if engine_run.killed:
            raise LoadError(
                f"the engine was not ready after {self._load_timeout_s:g} s; where loading takes"
                " longer than that, raise --load-timeout-s"
            )
        raise LoadError(
            f"the engine process ended while it started (exit code {engine_run.reap()})"
        )
