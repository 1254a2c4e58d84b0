"""`EngineRun`: one engine process, from its start to its end"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import infer.replicas.messages as messages
from infer.engine.commands import Add, Command
from infer.engine.engine_client import HEARTBEAT_S, SOFT_LIMIT_S
from infer.replicas.spawned import Spawned

log = logging.getLogger(__name__)

LOADING_LOG_S = 30.0
"""Seconds between two log lines about an engine that is being loaded."""
STOP_S = 5.0
"""Seconds that a process may take to end after `Stop`."""
ANSWER_S = 2.0
"""Seconds that a process has to write its stacks before it is made to, at the risk of its end."""
LAST_WORDS_S = 1.0
"""Seconds for which stderr is read after the end of its process: another may hold it open."""


class EngineRun:
    """A process builds its engine at once (`Begin`), or first stands by (`Prepare`, then `Begin`).

    Watchdog: a process reports each step, and every `HEARTBEAT_S` when it has nothing to do. After
    a soft limit without a report while it has work, its stacks are written to a file that a line of
    the log names; after the caller's limit it is killed. Its heartbeat is no report: it says that
    the process lives, not that its engine works.
    """

    def __init__(
        self, first: messages.Begin | messages.Prepare, spawned: Spawned | None = None
    ) -> None:
        """`first`: the first frame that the process gets. `spawned`: the process, where it has been
        started before."""
        spawned = spawned or Spawned()
        self.killed = False
        """Whether it was killed here, because it did not report or was not ready in time."""
        self.unsent = ""
        """Why a message to the process could not be written, which ends it; "" in all other cases.
        """
        self._reported_s = time.monotonic()
        self._added_s = float("-inf")
        """When the first request was sent since the last report, or before it."""
        self._has_work = self._has_dumped = False
        self._stacks = spawned.stacks
        """Where the process writes its stacks."""
        self._stacks_before = 0
        """Bytes that it had written when it was asked."""
        self._forces_at_s: float | None = None
        """When it is to write them in any way; None: it need not."""
        self._stacks_path: str | None = None
        """Where they are copied for the operator; None: nobody has asked for them."""
        self._commands: queue.SimpleQueue[tuple[int, Command] | None] = queue.SimpleQueue()
        """Commands to be written, with their generations; None ends the writer."""
        self._begins: queue.SimpleQueue[messages.Begin | None] = queue.SimpleQueue()
        """The frame that ends standing by, or None where the process ends before."""
        self._process = spawned.popen
        self._channel = messages.Channel(spawned.end_here)
        self._writer = threading.Thread(target=self._write, args=(first,), daemon=True)
        self._writer.start()
        context = contextvars.copy_context()  # its lines carry `LOG_FIELDS`, too
        self._listener = threading.Thread(
            target=context.run, args=(self._listen,), name="infer-stderr", daemon=True
        )
        self._listener.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def _silence_s(self) -> float:
        """Seconds since its last report."""
        return time.monotonic() - self._reported_s

    @property
    def _busy_silence_s(self) -> float:
        """Seconds without a report since there is work; 0 without work."""
        if self._has_work:
            return self._silence_s
        # A request may have been sent just before the last report, which did not know of it.
        is_new = self._added_s >= self._reported_s - HEARTBEAT_S
        return time.monotonic() - max(self._added_s, self._reported_s) if is_new else 0.0

    def send(self, generation: int, command: Command) -> None:
        """Send a command without waiting. Commands that come while a frame is being written go into
        the next frame together."""
        if isinstance(command, Add) and self._added_s < self._reported_s:
            self._added_s = time.monotonic()
        self._commands.put((generation, command))

    @property
    def stands_by(self) -> bool:
        """Whether the process has said so after `Prepare`; until `begin`."""
        return self._channel.has_arrived and not self.has_ended

    def begin(self, begin: messages.Begin, timeout_s: float) -> bool:
        """Have a process that stands by build its engine; whether it says in time that it does."""
        self._begins.put(begin)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        ends_s = time.monotonic() + timeout_s
        for frame in self._channel.frames(timeout_s=timeout_s):
            if frame is None or time.monotonic() > ends_s:
                return False
            event = messages.decode_outward(frame)
            if isinstance(event, messages.Log):
                _log(event)
            elif not isinstance(event, messages.Heartbeat):
                self._reported_s = time.monotonic()
                return isinstance(event, messages.HasBegun)
        return False

    def _write(self, first: messages.Begin | messages.Prepare) -> None:
        """Write commands until `reap`. A process that waits for a message that cannot be written
        would wait for ever, so it is killed."""
        try:
            self._write_all(first)
        except Exception as error:
            log.debug("a message to the engine cannot be written", exc_info=True)
            self.unsent = f"{type(error).__name__}: {error}"
            self.kill()

    def _write_all(self, first: messages.Begin | messages.Prepare) -> None:
        with contextlib.suppress(OSError):  # the process has died; the reader of events finds out
            self._channel.send(first)
            if isinstance(first, messages.Prepare):
                begin = self._begins.get()
                if begin is None:
                    return
                self._channel.send(begin)
            while True:
                commands = [self._commands.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        commands.append(self._commands.get_nowait())
                wanted = [wire for wire in commands if wire is not None]
                if len(wanted) < len(commands):
                    return
                for generation, group in itertools.groupby(wanted, itemgetter(0)):
                    together = [command for _, command in group]
                    self._channel.send(messages.Commands(generation, together))

    def _listen(self) -> None:
        """Log what the process writes to stderr: stacks, warnings of libraries. The process itself
        never waits for a reader of the log."""
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
        self,
        hang_s: float | None,
        *,
        soft_limit_s: float = SOFT_LIMIT_S,
        load_timeout_s: float | None = None,
    ) -> Iterator[messages.Outward]:
        """What comes from the process until it ends; its log lines are logged.

        `hang_s`: seconds without a report after which it is killed; None = no limit.
        `soft_limit_s`: seconds without a report after which its stacks are written, if it has work.
        `load_timeout_s`: seconds after which it is killed if the caller is still reading.
        """
        started_s = time.monotonic()
        said_s = started_s
        for frame in self._channel.frames(timeout_s=HEARTBEAT_S):
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
                    self._watch(self._silence_s, soft_limit_s, hang_s)
                continue
            event = messages.decode_outward(frame)
            if isinstance(event, messages.Heartbeat):
                if hang_s is not None:
                    self._watch(self._silence_s, soft_limit_s, hang_s)
                yield event
                continue
            self._reported_s, self._has_dumped, self._forces_at_s = time.monotonic(), False, None
            if isinstance(event, messages.Report):
                gauges = event.stats.gauges
                self._has_work = bool(gauges.num_running or gauges.num_waiting)
            elif isinstance(event, messages.Log):
                _log(event)
            yield event

    def _watch(self, silence_s: float, soft_limit_s: float, hang_s: float) -> None:
        self._copy_stacks()
        if silence_s >= hang_s:
            log.error("the engine has not reported for %.0f s: it is killed", silence_s)
            self.killed = True
            self.kill()
        elif self._has_dumped and self._forces_at_s is not None:
            self._force_stacks(self._forces_at_s)
        elif self._busy_silence_s >= soft_limit_s and not self._has_dumped:
            self._has_dumped = True
            if messages.DUMP_SIGNAL is not None:
                self._stacks_before = os.fstat(self._stacks.fileno()).st_size
                self._forces_at_s = time.monotonic() + ANSWER_S
                self._process.send_signal(messages.DUMP_SIGNAL)
            if self._stacks_path is None:
                file, self._stacks_path = tempfile.mkstemp(".txt", "infer-stacks-")
                os.close(file)
            text = "the engine has not reported for %.0f s; the stacks of its threads go to %s"
            log.warning(text, silence_s, self._stacks_path)

    def _force_stacks(self, at_s: float) -> None:
        """Have the process write its stacks in any way, at `at_s`, if it has written none since it
        was asked."""
        if os.fstat(self._stacks.fileno()).st_size > self._stacks_before:
            self._forces_at_s = None
        elif time.monotonic() >= at_s:
            self._forces_at_s = None
            if messages.FORCED_DUMP_SIGNAL is not None:
                self._process.send_signal(messages.FORCED_DUMP_SIGNAL)

    def _copy_stacks(self) -> None:
        """Copy what the process has written of its stacks, if they were asked for."""
        if self._stacks_path is not None:
            size = os.fstat(self._stacks.fileno()).st_size
            with contextlib.suppress(OSError):
                Path(self._stacks_path).write_bytes(os.pread(self._stacks.fileno(), size, 0))

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of the process, so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        """End the process at once; does nothing after its end."""
        self._process.kill()

    def reap(self) -> int:
        """Wait for the end of the process, kill it after `STOP_S`, and free what belongs to it.
        Returns its exit code, or minus the number of the signal that ended it."""
        try:
            code = self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        self._begins.put(None)
        self._commands.put(None)
        self._writer.join()
        self._listener.join(LAST_WORDS_S)
        self._copy_stacks()
        self._stacks.close()
        self._channel.close()
        return code


def _log(event: messages.Log) -> None:
    logging.getLogger(event.logger).log(event.level, "%s", event.line)


def _log_stderr(lines: list[bytes]) -> None:
    if text := b"\n".join(lines).strip(b"\n"):
        log.warning("%s", text.decode(errors="replace"))
