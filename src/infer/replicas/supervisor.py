"""`EngineProcess`: an engine in a process of its own, started again whenever it dies

It is a `Member` of a `Fleet`, which holds the requests. This is the API side of the boundary; it
needs no torch. `launch` starts the first process and raises the error that keeps it from starting.
Then one thread reads the reports of the process; when the process has ended it starts the next one,
or takes the `Standby`. Each process that serves is a life, and so is what follows a `Reset` of the
same process. An engine that does not start is tried again after pauses that grow. After
`MAX_FAILURES` in a row the fleet hears that it is failing, and that it lives when an engine starts.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, assert_never

import infer.replicas.messages as messages
from infer.engine.commands import Abort, Add, FollowPages, Reset, Stop
from infer.engine.engine_client import SOFT_LIMIT_S
from infer.errors import LoadError
from infer.log_fields import LOG_FIELDS
from infer.replicas.blame import was_from_outside
from infer.replicas.engine_run import STOP_S, EngineRun
from infer.replicas.member import Loss, MemberListener
from infer.replicas.spawned import Spawned
from infer.replicas.standby import Standby
from infer.replicas.supervisor_state import Lifecycle, SupervisorState
from infer.threads import BackgroundThread
from infer.types import FinishReason, Request
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineCounters, EngineStats
from infer.types.fingerprint import Fingerprint

log = logging.getLogger(__name__)

HANG_S = 120.0
"""seconds without a report after which a process is killed; longer than any step of a large model
on a slow CPU"""
LOAD_TIMEOUT_S = 3600.0
"""seconds after which an engine that is not ready is given up; a checkpoint may be downloaded"""
MAX_FAILURES = 5
"""number of processes in a row without a token for any request, before the member is failing"""
MAX_PAUSE_S = 30.0
"""longest pause in seconds between two attempts to start a process"""
STANDBY_ANSWER_S = 5.0
"""seconds that a standby has to say that it begins; it may be importing modules"""


def _stopped_while_loading() -> LoadError:
    return LoadError("the engine was stopped while it was being loaded")


class EngineProcess:
    """A `Member`; see the module's docstring."""

    def __init__(
        self,
        factory: str,
        settings: Mapping[str, Any],
        *,
        name: str = "engine",
        log_fields: Mapping[str, str] = MappingProxyType({}),
        hang_s: float = HANG_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
        soft_limit_s: float = SOFT_LIMIT_S,
        max_pause_s: float = MAX_PAUSE_S,
        standby: Standby | None = None,
        standby_answer_s: float = STANDBY_ANSWER_S,
        spawned: Spawned | None = None,
        on_alone: Callable[[], None] = lambda: None,
    ) -> None:
        """`factory`: `module:function` that makes a `Blueprint` of `settings` in the process.
        `name`: its name in a fleet. `log_fields`: what its lines of the log carry. `standby`: where
        the next process comes from, if there is one. `spawned`: the first process, where it is
        started already. `on_alone`: called when `alone` names another request."""
        self._name = name
        self._standby, self._standby_answer_s = standby, standby_answer_s
        self._spawned = spawned
        self._soft_limit_s, self._on_alone = soft_limit_s, on_alone
        self._max_pause_s = max_pause_s
        self._load_timeout_s = load_timeout_s
        self._log_fields = dict(log_fields)
        """and the model's name, as soon as it is known"""
        if settings.get("served_model_name"):
            self._log_fields["model"] = settings["served_model_name"]
        level = logging.getLogger("infer").getEffectiveLevel()
        self._begin = messages.Begin(factory, dict(settings), level)
        self._hang_s = hang_s
        self._lock = threading.Lock()
        """held while the life changes together with the process that gets the commands"""
        self._life = 0
        """number of the latest life"""
        self._is_abandoned = False
        """whether the fleet has ended the latest life"""
        self._limits: EngineLimits | None = None
        self._fingerprint = Fingerprint()
        self._lifecycle = Lifecycle()
        self._engine_run: EngineRun | None = None
        """the latest process; the state says whether it takes commands"""
        self._num_failures = 0
        """processes in a row that gave nobody a token"""
        self._stats = EngineStats()
        """of the process that works"""
        self._counted = EngineCounters()
        """sum over the processes before it"""
        self._listener: MemberListener | None = None
        self._thread: BackgroundThread | None = None

    def launch(self, on_text: Callable[[messages.Text], None]) -> EngineLimits:
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

    def wait(self, on_text: Callable[[messages.Text], None]) -> EngineLimits:
        """Wait until the first process is ready; raises the `LoadError` that keeps it from
        starting.

        `on_text` is called while it loads its weights; what it raises ends the process.
        """
        token = LOG_FIELDS.set(self._log_fields)
        try:
            return self._wait(on_text)
        finally:
            LOG_FIELDS.reset(token)

    def _wait(self, on_text: Callable[[messages.Text], None]) -> EngineLimits:
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
        self._stats, self._fingerprint = ready.stats, ready.fingerprint
        settings = {**self._begin.settings, **ready.settings}
        self._begin = messages.Begin(self._begin.factory, settings, self._begin.log_level)
        self._limits = ready.limits
        return ready.limits

    @property
    def name(self) -> str:
        """See `Member`."""
        return self._name

    @property
    def limits(self) -> EngineLimits:
        """See `Member`; after `launch`."""
        assert self._limits is not None, "limits are known after launch"
        return self._limits

    @property
    def fingerprint(self) -> Fingerprint:
        """See `Member`."""
        return self._fingerprint

    def start(self, listener: MemberListener) -> None:
        """See `Member`; after `launch`."""
        if not self._lifecycle.move(SupervisorState.SERVING):
            return
        self._listener = listener
        listener.ready(self, self._next_life())
        self._thread = BackgroundThread(self._run, self._end, "infer-engine")
        self._thread.start()
        self._want_standby()

    @property
    def is_alive(self) -> bool:
        """Whether requests are accepted; they wait while one process follows another."""
        return self._lifecycle.state.takes_requests

    @property
    def is_ready(self) -> bool:
        """Whether a process works on requests and is not silent."""
        is_serving = self._lifecycle.state is SupervisorState.SERVING
        return is_serving and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """See `Member`."""
        return self.silence_s >= self._soft_limit_s

    @property
    def silence_s(self) -> float:
        """See `Member`."""
        worker = self._worker
        return 0.0 if worker is None else worker.silence_s

    @property
    def link_silence_s(self) -> float:
        """See `Member`."""
        worker = self._worker
        return 0.0 if worker is None else worker.link_silence_s

    @property
    def alone(self) -> str | None:
        """See `Member`."""
        worker = self._worker
        return None if worker is None else worker.alone

    @property
    def pid(self) -> int | None:
        """Process id of the process that takes commands, if there is one."""
        worker = self._worker
        return None if worker is None else worker.pid

    @property
    def _worker(self) -> EngineRun | None:
        """The process that takes commands, if there is one."""
        return self._engine_run if self._lifecycle.state.has_worker else None

    def _worker_of(self, life: int) -> EngineRun | None:
        """The process of a life, if it takes commands. The lock is held."""
        return self._worker if life == self._life and not self._is_abandoned else None

    def _next_life(self) -> int:
        """Begin another life; returns its number."""
        with self._lock:
            self._life += 1
            self._is_abandoned = False
            return self._life

    def add(self, request: Request, life: int) -> None:
        """See `Member`."""
        with self._lock:
            if (worker := self._worker_of(life)) is not None:
                worker.send(Add(request, time.monotonic()))

    def abort(self, request_id: str, life: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `Member`."""
        with self._lock:
            if (worker := self._worker_of(life)) is not None:
                worker.send(Abort(request_id, reason))

    def follow_pages(self, life: int) -> None:
        """See `Member`."""
        with self._lock:
            if (worker := self._worker_of(life)) is not None:
                worker.send(FollowPages())

    def abandon(self, life: int) -> None:
        """See `Member`."""
        with self._lock:
            if (worker := self._worker_of(life)) is not None:
                self._is_abandoned = True
                worker.send(Reset(life))

    def stop(self) -> None:
        """See `Member`."""
        if self._thread is not None:
            self._thread.stop()
            return
        if self._end().has_worker and self._engine_run is not None:
            self._engine_run.reap()
            self._lifecycle.move(SupervisorState.STOPPED)

    def _end(self) -> SupervisorState:
        """End the process, and the thread within `STOP_S`; returns the state before."""
        with self._lock:
            before, engine_run = self._lifecycle.stop(), self._engine_run
        if engine_run is None or before.is_ending:
            return before
        if before.has_worker:
            engine_run.send(Stop())
        else:
            engine_run.kill()
        if self._thread is not None:
            self._thread.join(STOP_S)
            engine_run.kill()
        return before

    def stats(self) -> EngineStats:
        """See `Member`."""
        with self._lock:
            stats, counted = self._stats, self._counted
        return EngineStats(stats.gauges, counted.plus(stats.counters))

    def _run(self) -> None:
        LOG_FIELDS.set(self._log_fields)
        engine_run = self._engine_run
        try:
            while engine_run is not None:
                self._follow(engine_run)
                engine_run = self._start_again()
            self._lifecycle.move(SupervisorState.STOPPED)
        except BaseException:
            log.exception("the engine's supervisor has died")
            self._lifecycle.move(SupervisorState.DEAD)
            if self._listener is not None:
                self._listener.gone(self)
            if self._engine_run is not None:
                self._engine_run.reap()

    def _follow(self, engine_run: EngineRun) -> None:
        """Pass on the reports of a process until it ends; then account for its end."""
        assert self._listener is not None, "reports are read after start"
        scores = messages.ScoreCollector()
        for event in engine_run.events(self._hang_s, soft_limit_s=self._soft_limit_s):
            match event:
                case messages.ComputingAlone():
                    engine_run.computes_alone(event.request_id)
                    self._on_alone()
                case messages.PromptScores():
                    scores.add(event)
                case messages.Report():
                    engine_run.computes_alone(None)
                    self._stats = event.stats
                    if event.outputs:
                        self._num_failures = 0
                    outputs = scores.complete(event.outputs) if event.outputs else []
                    if outputs or event.step_events:
                        self._listener.reported(self, self._life, outputs, event.step_events)
                case messages.HasReset():
                    # Reports before this one had the number of a life that the fleet has ended.
                    self._listener.ready(self, self._next_life())
                case messages.HasBegun() | messages.Text() | messages.Ready() | messages.Refused():
                    log.warning("the engine process says twice how it has started")
                case _:
                    assert_never(event)
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
        loss = Loss(f"the engine process has died ({how})", from_outside, engine_run.alone)
        if self._is_abandoned:
            log.error("%s", loss.reason)
        elif self._listener.lost(self, self._life, loss):
            return
        self._count_failure()

    def _start_again(self) -> EngineRun | None:
        """The next process, when it takes commands; None when it is time to stop."""
        started_s = time.monotonic()
        while not self._lifecycle.wait_for_stop(self._pause_s()):
            engine_run = self._next_run()
            try:
                ready = self._greet(engine_run, lambda text: None)
                requests = self._hand_over(ready)
            except LoadError as error:
                engine_run.kill()
                engine_run.reap()
                if not self._lifecycle.state.is_ending:
                    log.error("the engine cannot be started again: %s", error)
                    self._count_failure()
                continue
            took_s = time.monotonic() - started_s
            log.warning("another engine process has %d requests after %.1f s", requests, took_s)
            return engine_run
        return None

    def _hand_over(self, ready: messages.Ready) -> int:
        """Begin a life with a new process; returns the number of requests that it gets."""
        assert self._listener is not None, "a process follows another after start"
        self._num_failures = min(self._num_failures, MAX_FAILURES - 1)
        life = self._next_life()
        with self._lock:
            if not self._lifecycle.move(SupervisorState.SERVING):
                raise _stopped_while_loading()
            self._stats, self._fingerprint = ready.stats, ready.fingerprint
        num_requests = self._listener.ready(self, life)
        self._want_standby()
        return num_requests

    def _want_standby(self) -> None:
        if self._standby is not None:
            self._standby.want()

    def _pause_s(self) -> float:
        num = self._num_failures
        return 0.0 if num < 2 else min(self._max_pause_s, 0.5 * 2.0 ** (num - 2))

    def _count_failure(self) -> None:
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            self._lifecycle.move(SupervisorState.REFUSING)
            if self._listener is not None:
                reason = f"the engine has failed {MAX_FAILURES} times in a row"
                self._listener.failing(self, reason)

    def _next_run(self) -> EngineRun:
        """A process that builds its engine: the one that was started before, the standby if it
        answers, else a new one."""
        spawned, self._spawned = self._spawned, None
        if spawned is not None:
            return self._hold(EngineRun(self._begin, spawned))
        if self._standby is not None and (standby := self._standby.take()) is not None:
            if self._hold(standby).begin(self._begin, self._standby_answer_s):
                return standby
            if not self._lifecycle.state.is_ending:
                log.warning("the standby does not answer: a new process is started")
            standby.kill()
            standby.reap()
        return self._hold(EngineRun(self._begin))

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
        for event in engine_run.events(None, load_timeout_s=self._load_timeout_s):
            match event:
                case messages.HasBegun():
                    pass
                case messages.Text():
                    self._log_fields.setdefault("model", event.model_name)
                    on_text(event)
                case messages.Refused():
                    raise event.error.exception()
                case messages.Ready():
                    return event
                case (
                    messages.Report()
                    | messages.PromptScores()
                    | messages.ComputingAlone()
                    | messages.HasReset()
                ):
                    raise LoadError("the engine process reports a step before it is ready")
                case _:
                    assert_never(event)
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
