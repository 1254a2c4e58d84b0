"""`EngineProcess`: an engine in a process of its own, started again whenever it dies.

The API side of the boundary, without torch. `launch` starts the first process and raises what keeps
it from starting; then one thread reads what the process reports and, when the process has ended,
starts the next one and gives it every unfinished request with its tokens so far (`RequestJournal`).
Until then new requests wait. An engine that cannot be started is tried again, ever more rarely;
after a few times in a row requests are refused and those that wait are failed, until it works.

Watchdog: a process reports each step, and each second when it has nothing to do. If nothing comes
for `SOFT_LIMIT_S` its stacks are logged; after `hang_s` it is killed, and has died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, assert_never

import infer.engine.process.messages as messages
from infer.engine.client.engine_client import HEARTBEAT_S, SOFT_LIMIT_S, Deliver
from infer.engine.commands import Abort, Add, Command, Stop
from infer.engine.process.blame import was_from_outside
from infer.engine.process.child import DUMP_SIGNAL
from infer.engine.process.journal import RequestJournal
from infer.engine.process.supervisor_state import Lifecycle, SupervisorState
from infer.errors import EngineDeadError, LoadError
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineCounters, EngineStats

log = logging.getLogger(__name__)

HANG_S = 120.0
"""seconds without a report after which a process is killed; longer than any step of a large model
on a slow CPU"""
LOAD_TIMEOUT_S = 3600.0
"""seconds after which an engine that is not ready is given up; a checkpoint may be downloaded"""
LOADING_LOG_S = 30.0
"""seconds between two log lines about an engine that is being loaded"""
STOP_S = 5.0
"""seconds that a process may take to end after `Stop`"""
LAST_WORDS_S = 1.0
"""seconds for which stderr is read after the end of its process: another may hold it open"""
MAX_FAILURES = 5
"""processes in a row that gave no request a token, before requests are refused"""
_MAX_PAUSE_S = 30.0


class _EngineRun:
    """One engine process, from its start to its end."""

    def __init__(self, begin: messages.Begin) -> None:
        self.alone: str | None = None
        """id of the request that it computes by itself"""
        self.killed = False
        """whether we have killed it because it did not report"""
        self._heard_s = time.monotonic()
        self._has_dumped = False
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        """to be written; None: the writer is to end"""
        ours, theirs = socket.socketpair()
        with theirs:
            # -P and PYTHONPATH: modules are found where this process finds them, nowhere else.
            arguments = [sys.executable, "-P", "-m", "infer.engine.process.child"]
            self._process = subprocess.Popen(
                [*arguments, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._channel = messages.Channel(ours)
        self._writer = threading.Thread(target=self._write, args=(begin,), daemon=True)
        self._writer.start()
        self._listener = threading.Thread(target=self._listen, name="infer-stderr", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def computes_alone(self, request_id: str | None) -> None:
        """Note which request it computes by itself from now on."""
        self.alone = request_id

    @property
    def silence_s(self) -> float:
        """Seconds since its last report."""
        return time.monotonic() - self._heard_s

    def send(self, command: Command) -> None:
        """Does not wait; what is sent while the last frame is being written goes in one frame."""
        self._commands.put(command)

    def _write(self, begin: messages.Begin) -> None:
        with contextlib.suppress(OSError):  # it has died; the reader finds out
            self._channel.send(begin)
            while True:
                commands = [self._commands.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        commands.append(self._commands.get_nowait())
                wanted = [command for command in commands if command is not None]
                if len(wanted) < len(commands):
                    return
                self._channel.send(messages.Commands(wanted))

    def _listen(self) -> None:
        """What it writes to stderr (stacks, warnings of libraries) is logged here, where a log that
        nobody reads stops nothing, and where it gets the log's form."""
        assert self._process.stderr is not None
        with self._process.stderr as pipe:
            rest = b""
            while data := os.read(pipe.fileno(), 1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > 1 << 16:
                    lines, rest = [*lines, rest], b""
                _log_stderr(lines)
            _log_stderr([rest])

    def events(
        self, hang_s: float | None, *, load_timeout_s: float | None = None
    ) -> Iterator[messages.Event]:
        """What it reports, until it ends; its log lines are logged here. `hang_s`: the watchdog's
        hard limit; None = none. `load_timeout_s`: how long it may take from now until the last of
        these events."""
        started_s = time.monotonic()
        said_s = started_s
        for frame in self._channel.frames(patience_s=HEARTBEAT_S):
            now_s = time.monotonic()
            if load_timeout_s is not None and now_s - started_s >= load_timeout_s:
                self.killed = True
                self.kill()
                return
            if load_timeout_s is not None and now_s - said_s >= LOADING_LOG_S:
                said_s = now_s
                log.info("the engine has been loading for %.0f s", now_s - started_s)
            if frame is None:
                if hang_s is not None:
                    self._watch(self.silence_s, hang_s)
                continue
            self._heard_s, self._has_dumped = time.monotonic(), False
            event = messages.decode_outward(frame)
            if isinstance(event, messages.Log):
                logging.getLogger(event.logger).log(event.level, "%s", event.line)
            else:
                yield event

    def _watch(self, silence_s: float, hang_s: float) -> None:
        if silence_s >= hang_s:
            log.error("the engine has not reported for %.0f s: it is killed", silence_s)
            self.killed = True
            self.kill()
        elif silence_s >= SOFT_LIMIT_S and not self._has_dumped:
            log.warning("the engine has not reported for %.0f s; its stacks follow", silence_s)
            self._has_dumped = True
            self._process.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> int:
        """Its exit code (or minus the signal that ended it); afterwards nothing is left of it."""
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._commands.put(None)
        self._writer.join()
        self._listener.join(LAST_WORDS_S)
        self._channel.close()
        return code


def _stopped_while_loading() -> LoadError:
    return LoadError("the engine was stopped while it was being loaded")


def _log_stderr(lines: list[bytes]) -> None:
    if text := b"\n".join(lines).strip(b"\n"):
        log.warning("%s", text.decode(errors="replace"))


class EngineProcess:
    """An `EngineClient`; see the module's docstring."""

    def __init__(
        self,
        factory: str,
        settings: Mapping[str, Any],
        *,
        hang_s: float = HANG_S,
        load_timeout_s: float = LOAD_TIMEOUT_S,
    ) -> None:
        """`factory`: `module:function` that makes a `Blueprint` of `settings`, over there."""
        self._load_timeout_s = load_timeout_s
        level = logging.getLogger("infer").getEffectiveLevel()
        self._begin = messages.Begin(factory, dict(settings), level)
        self._hang_s = hang_s
        self._lock = threading.Lock()
        """held to change the journal together with who gets the commands"""
        self._journal = RequestJournal()
        self._lifecycle = Lifecycle()
        self._engine_run: _EngineRun | None = None
        """the latest process; the state says whether it takes commands"""
        self._num_failures = 0
        """processes in a row that gave nobody a token"""
        self._stats = EngineStats()
        """of the process that works"""
        self._counted = EngineCounters()
        """sum over the processes before it"""
        self._deliver: Deliver = lambda outputs, step_events: None
        self._died: Callable[[], None] = lambda: None
        self._thread: BackgroundThread | None = None

    def launch(self, on_text: Callable[[messages.Text], None]) -> EngineLimits:
        """Start the first process; raises the `LoadError` that keeps it from starting.

        `on_text` is called while it loads its weights; what it raises ends the process.
        """
        self._lifecycle.move(SupervisorState.LOADING)
        engine_run = self._new_run()
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
        self._begin = messages.Begin(self._begin.factory, settings, self._begin.log_level)
        return ready.limits

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """See `EngineClient`; after `launch`."""
        if not self._lifecycle.move(SupervisorState.SERVING):
            return
        self._deliver, self._died = deliver, died
        self._thread = BackgroundThread(self._run, self._end, "infer-engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken; while one process follows another they wait."""
        return self._lifecycle.state.takes_requests

    @property
    def is_ready(self) -> bool:
        """Whether there is a process that works, and has not been silent for too long."""
        is_serving = self._lifecycle.state is SupervisorState.SERVING
        return is_serving and self.silence_s < SOFT_LIMIT_S

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        worker = self._worker
        return 0.0 if worker is None else worker.silence_s

    @property
    def pid(self) -> int | None:
        """Of the process that works, if one does."""
        worker = self._worker
        return None if worker is None else worker.pid

    @property
    def _worker(self) -> _EngineRun | None:
        """The process that takes commands, if there is one."""
        return self._engine_run if self._lifecycle.state.has_worker else None

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        with self._lock:
            self._journal.add(request)
            if (worker := self._worker) is not None:
                worker.send(Add(request))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        with self._lock:
            self._journal.drop(request_id)
            if (worker := self._worker) is not None:
                worker.send(Abort(request_id, reason))

    def stop(self) -> None:
        """See `EngineClient`."""
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
        """See `EngineClient`."""
        with self._lock:
            stats, counted = self._stats, self._counted
        return EngineStats(stats.gauges, counted.plus(stats.counters))

    def _run(self) -> None:
        engine_run = self._engine_run
        try:
            while engine_run is not None:
                self._follow(engine_run)
                engine_run = self._start_again()
            self._lifecycle.move(SupervisorState.STOPPED)
        except BaseException:
            log.exception("the engine's supervisor has died")
            self._lifecycle.move(SupervisorState.DEAD)
            self._died()
            if self._engine_run is not None:
                self._engine_run.reap()

    def _follow(self, engine_run: _EngineRun) -> None:
        """Pass on what a process reports, until it ends; and put down what it leaves behind."""
        step: list[StepOutput] = []
        for event in engine_run.events(self._hang_s):
            match event:
                case messages.ComputingAlone():
                    engine_run.computes_alone(event.request_id)
                case messages.Report():
                    engine_run.computes_alone(None)
                    self._stats = event.stats
                    if event.outputs:
                        self._num_failures = 0
                        with self._lock:
                            step += self._journal.record(event.outputs)
                    if not event.more and (step or event.step_events):
                        self._deliver(step, event.step_events)
                        step = []
                case messages.Text() | messages.Ready() | messages.Refused():
                    log.warning("the engine process says twice how it has started")
                case _:
                    assert_never(event)
        if step:  # it died before the last part of the step had come
            self._deliver(step, None)
        with self._lock:
            is_wanted = self._lifecycle.move(SupervisorState.RESTARTING)
            self._counted = self._counted.plus(self._stats.counters)
            self._stats = EngineStats()
        code = engine_run.reap()
        if not is_wanted:
            return
        from_outside = was_from_outside(code, killed_by_us=engine_run.killed)
        with self._lock:
            self._counted = self._counted.plus(EngineCounters(num_restarts=1))
            count = len(self._journal)
            ends = self._journal.crashed(engine_run.alone, from_outside=from_outside)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log.error("the engine process has died (%s) with %d requests unfinished", how, count)
        if ends:
            log.error("request %s is to blame and is given up", engine_run.alone)
            self._deliver(ends, None)
        else:
            self._count_failure()

    def _start_again(self) -> _EngineRun | None:
        """The next process, when it takes commands; None when it is time to stop."""
        started_s = time.monotonic()
        while not self._lifecycle.wait_for_stop(self._pause_s()):
            engine_run = self._new_run()
            try:
                ready = self._greet(engine_run, lambda text: None)
                requests = self._hand_over(engine_run, ready)
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

    def _hand_over(self, engine_run: _EngineRun, ready: messages.Ready) -> int:
        """Give a new process all unfinished requests; returns their number."""
        self._num_failures = min(self._num_failures, MAX_FAILURES - 1)
        with self._lock:
            if not self._lifecycle.move(SupervisorState.SERVING):
                raise _stopped_while_loading()
            self._stats = ready.stats
            requests = self._journal.resumed()
            for request in requests:
                engine_run.send(Add(request))
        return len(requests)

    def _pause_s(self) -> float:
        num = self._num_failures
        return 0.0 if num < 2 else min(_MAX_PAUSE_S, 0.5 * 2.0 ** (num - 2))

    def _count_failure(self) -> None:
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            self._lifecycle.move(SupervisorState.REFUSING)
            log.error("the engine has failed %d times in a row: requests are refused", MAX_FAILURES)
            reason = ErrorRecord.of(EngineDeadError("the engine has died and does not start again"))
            with self._lock:
                ends = self._journal.fail_all(reason)
            self._deliver(ends, None)

    def _new_run(self) -> _EngineRun:
        """A process that is starting, which `stop` ends."""
        engine_run = _EngineRun(self._begin)
        with self._lock:
            self._engine_run = engine_run
            if self._lifecycle.state.is_ending:
                engine_run.kill()
        return engine_run

    def _greet(
        self, engine_run: _EngineRun, on_text: Callable[[messages.Text], None]
    ) -> messages.Ready:
        for event in engine_run.events(None, load_timeout_s=self._load_timeout_s):
            match event:
                case messages.Text():
                    on_text(event)
                case messages.Refused():
                    raise event.error.exception()
                case messages.Ready():
                    return event
                case messages.Report() | messages.ComputingAlone():
                    raise LoadError("the engine process reports a step before it is ready")
                case _:
                    assert_never(event)
        if self._lifecycle.state.is_ending:
            raise _stopped_while_loading()
        if engine_run.killed:
            raise LoadError(
                f"the engine was not ready after {self._load_timeout_s:g} s; where loading takes"
                " longer than that, raise --load-timeout-s"
            )
        raise LoadError(
            f"the engine process ended while it started (exit code {engine_run.reap()})"
        )
