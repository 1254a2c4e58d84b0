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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import infer.engine.process.messages as messages
from infer.engine.client.input import EngineLimits
from infer.engine.core import GAUGES
from infer.engine.loop import HEARTBEAT_S, SOFT_LIMIT_S, Abort, Command, Deliver
from infer.engine.process.child import DUMP_SIGNAL
from infer.engine.process.journal import RequestJournal
from infer.errors import EngineDeadError, LoadError
from infer.threads import BackgroundThread
from infer.types import ErrorRecord, FinishReason, Request, StepOutput

log = logging.getLogger(__name__)

HANG_S = 120.0
"""longer than any step; a step of a large model on a slow CPU takes many seconds"""
LOAD_TIMEOUT_S = 3600.0
"""an engine that is not ready by then is given up; it may have a large checkpoint to download"""
LOADING_LOG_S = 30.0
"""an engine that is being loaded is mentioned so often"""
STOP_S = 5.0
"""how long a process may take to end when it is told to"""
LAST_WORDS_S = 1.0
"""how long what a process has written to stderr is read after its end: somebody else may hold it"""
MAX_FAILURES = 5
"""lives in a row that gave nobody a token; then requests are refused until one begins well"""
_MAX_PAUSE_S = 30.0


class _EngineRun:
    """One engine process, from its start to its end."""

    def __init__(self, begin: messages.Begin) -> None:
        self.alone = ""
        """the request it is computing by itself"""
        self.killed = False
        """by us: it did not report any more"""
        self._heard_s = time.monotonic()
        self._has_dumped = False
        self._commands: queue.SimpleQueue[Command | EOFError] = queue.SimpleQueue()
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

    def computes_alone(self, request_id: str) -> None:
        """Which request it computes by itself from now on; "" = none."""
        self.alone = request_id

    @property
    def silence_s(self) -> float:
        """How long it has not reported."""
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
                wanted = [c for c in commands if not isinstance(c, EOFError)]
                if len(wanted) < len(commands):
                    return
                self._channel.send(wanted)

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
        """What it reports, until it ends. `hang_s`: the watchdog's hard limit; None = none.
        `load_timeout_s`: how long it may take from now until the last of these events."""
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
            event = messages.read_event(frame)
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
        self._commands.put(EOFError())
        self._writer.join()
        self._listener.join(LAST_WORDS_S)
        self._channel.close()
        return code


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
        """held to change the ledger together with who gets the commands"""
        self._journal = RequestJournal()
        self._ready: _EngineRun | None = None
        """gets the commands; None while there is nobody"""
        self._starting: _EngineRun | None = None
        self._num_failures = 0
        self._num_restarts = 0
        self._stats: dict[str, int | float] = {}
        self._counted: Counter[str] = Counter()
        """what the processes before this one have counted"""
        self._stopping = threading.Event()
        self._deliver: Deliver = lambda outputs, step_events: None
        self._died: Callable[[], None] = lambda: None
        self._thread: BackgroundThread | None = None

    def launch(self, on_text: Callable[[messages.Text], None]) -> EngineLimits:
        """Start the first process; raises the `LoadError` that keeps it from starting.

        `on_text` is called while it loads its weights; what it raises ends the process.
        """
        engine_run = self._begin_life()
        try:
            ready = self._greet(engine_run, on_text)
        except BaseException:
            engine_run.kill()
            engine_run.reap()
            raise
        finally:
            with self._lock:
                self._starting = None
        self._ready, self._stats = engine_run, ready.stats
        settings = {**self._begin.settings, **ready.settings}
        self._begin = messages.Begin(self._begin.factory, settings, self._begin.log_level)
        return ready.limits

    def start(self, deliver: Deliver, died: Callable[[], None]) -> None:
        """See `EngineClient`; after `launch`."""
        assert self._thread is None
        self._deliver, self._died = deliver, died
        self._thread = BackgroundThread(self._run, self._end, "infer-engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken; while one process follows another they wait."""
        return (
            self._thread is not None and self._thread.is_alive and self._num_failures < MAX_FAILURES
        )

    @property
    def is_ready(self) -> bool:
        """Whether there is a process that works, and has not been silent for too long."""
        return self._ready is not None and self.silence_s < SOFT_LIMIT_S and self.is_alive

    @property
    def silence_s(self) -> float:
        """See `EngineClient`."""
        engine_run = self._ready
        return 0.0 if engine_run is None else engine_run.silence_s

    @property
    def pid(self) -> int | None:
        """Of the process that works, if one does."""
        engine_run = self._ready
        return None if engine_run is None else engine_run.pid

    def add(self, request: Request) -> None:
        """See `EngineClient`."""
        with self._lock:
            self._journal.add(request)
            if self._ready is not None:
                self._ready.send(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `EngineClient`."""
        with self._lock:
            self._journal.drop(request_id)
            if self._ready is not None:
                self._ready.send(Abort(request_id, reason))

    def stop(self) -> None:
        """See `EngineClient`."""
        if self._thread is not None:
            self._thread.stop()
            return
        ready = self._ready
        self._end()
        if ready is not None:
            ready.reap()

    def _end(self) -> None:
        """Have the thread end within `STOP_S`, and what runs over there."""
        self._stopping.set()
        with self._lock:
            ready, starting = self._ready, self._starting
        if ready is not None:
            ready.send(None)
        if starting is not None:
            starting.kill()
        if self._thread is not None:
            self._thread.join(STOP_S)
            if ready is not None:
                ready.kill()

    def stats(self) -> dict[str, int | float]:
        """Gauges of the process that works, counts of all; `num_restarts`: how many have died."""
        stats = {name: value + self._counted[name] for name, value in self._stats.items()}
        return {**stats, "num_restarts": self._num_restarts}

    def _run(self) -> None:
        try:
            while self._ready is not None:
                self._follow(self._ready)
                if self._stopping.is_set():
                    return
                self._start_again()
        except BaseException:
            log.exception("the engine's supervisor has died")
            self._died()
        finally:
            if self._ready is not None:
                self._ready.reap()

    def _follow(self, engine_run: _EngineRun) -> None:
        """Pass on what a process reports, until it ends; and put down what it leaves behind."""
        scores = messages.ScoreCollector()
        for event in engine_run.events(self._hang_s):
            if isinstance(event, messages.ComputingAlone):
                engine_run.computes_alone(event.request_id)
            elif isinstance(event, messages.PromptScores):
                scores.add(event)
            elif isinstance(event, messages.Report):
                engine_run.computes_alone("")
                self._stats = event.stats
                step: list[StepOutput] = []
                if event.outputs:
                    self._num_failures = 0
                    with self._lock:
                        step = self._journal.record(scores.complete(event.outputs))
                if step or event.step_events:
                    self._deliver(step, event.step_events)
        with self._lock:
            self._ready = None
        ended = {name: value for name, value in self._stats.items() if name not in GAUGES}
        self._counted.update(ended)
        self._stats = dict.fromkeys((*self._stats, *ended), 0)
        code = engine_run.reap()
        if self._stopping.is_set():
            return
        self._num_restarts += 1
        from_outside = code == -signal.SIGKILL and not engine_run.killed
        with self._lock:
            count = len(self._journal)
            ends = self._journal.crashed(engine_run.alone, from_outside=from_outside)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        log.error("the engine process has died (%s) with %d requests unfinished", how, count)
        if ends:
            log.error("request %s is to blame and is given up", engine_run.alone)
            self._deliver(ends, None)
        else:
            self._count_failure()

    def _start_again(self) -> None:
        """Returns when there is a process that works, or when it is time to stop."""
        started_s = time.monotonic()
        while not self._stopping.wait(self._pause_s()):
            engine_run = self._begin_life()
            try:
                ready = self._greet(engine_run, lambda text: None)
            except LoadError as error:
                engine_run.kill()
                engine_run.reap()
                if not self._stopping.is_set():
                    log.error("the engine cannot be started again: %s", error)
                    self._count_failure()
                continue
            finally:
                with self._lock:
                    self._starting = None
            self._num_failures = min(self._num_failures, MAX_FAILURES - 1)
            with self._lock:
                self._ready, self._stats = engine_run, ready.stats
                requests = self._journal.resumed()
                for request in requests:
                    engine_run.send(request)
            took_s = time.monotonic() - started_s
            log.warning(
                "another engine process has %d requests after %.1f s", len(requests), took_s
            )
            return

    def _pause_s(self) -> float:
        num = self._num_failures
        return 0.0 if num < 2 else min(_MAX_PAUSE_S, 0.5 * 2.0 ** (num - 2))

    def _count_failure(self) -> None:
        self._num_failures += 1
        if self._num_failures == MAX_FAILURES:
            log.error("the engine has failed %d times in a row: requests are refused", MAX_FAILURES)
            reason = ErrorRecord.of(EngineDeadError("the engine has died and does not start again"))
            with self._lock:
                ends = self._journal.fail_all(reason)
            self._deliver(ends, None)

    def _begin_life(self) -> _EngineRun:
        """A process that is starting, which `stop` ends."""
        engine_run = _EngineRun(self._begin)
        with self._lock:
            self._starting = engine_run
            if self._stopping.is_set():
                engine_run.kill()
        return engine_run

    def _greet(
        self, engine_run: _EngineRun, on_text: Callable[[messages.Text], None]
    ) -> messages.Ready:
        for event in engine_run.events(None, load_timeout_s=self._load_timeout_s):
            if isinstance(event, messages.Text):
                on_text(event)
            elif isinstance(event, messages.Refused):
                raise event.error.exception()
            elif isinstance(event, messages.Ready):
                return event
        if self._stopping.is_set():
            raise LoadError("the engine was stopped while it was being loaded")
        if engine_run.killed:
            raise LoadError(
                f"the engine was not ready after {self._load_timeout_s:g} s; where loading takes"
                " longer than that, raise --load-timeout-s"
            )
        raise LoadError(
            f"the engine process ended while it started (exit code {engine_run.reap()})"
        )
