"""The engine process: builds an engine from `Begin`, and runs it until its parent has gone.

`python -m infer.engine.process.child FD PARENT` is started by `engine.process.supervisor` with one
end of a socket pair. Commands are read by a thread of their own, so that the end of the parent is
seen at once, whatever a step is doing. The process ignores the signals that a terminal or process
manager sends to the whole group: its parent decides when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import infer.engine.process.messages as messages
from infer.engine.commands import Command
from infer.engine.loop import Blueprint, EngineLoop, freeze_heap
from infer.errors import LoadError
from infer.types import ErrorRecord, StepOutput
from infer.types.step_events import StepEvents

WRAP_VARIABLE = "INFER_WRAP_CORE"
"""variable of the environment for tests: `module:function` that gets the engine core and returns
one that fails on purpose"""
_PR_SET_PDEATHSIG = 1


class _LogToParent(logging.Handler):
    def __init__(self, channel: messages.Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(messages.Log(record.name, record.levelno, self.format(record)))


def _end_with(parent: int) -> None:
    """Have the system end this process when its parent ends, and choose it first when memory runs
    out: the parent can start another engine."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
    if os.getppid() != parent:
        os._exit(1)


def _read(frames: Iterator[bytes | None], commands: queue.SimpleQueue[Command]) -> None:
    try:
        for frame in frames:
            assert frame is not None
            message = messages.decode_inward(frame)
            assert isinstance(message, messages.Commands), "an engine begins once"
            for command in message.commands:
                commands.put(command)
    finally:
        os._exit(1)  # the parent has gone


def main(fd: int, parent: int) -> int:
    """Run an engine; returns the exit code of the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_with(parent)
    faulthandler.enable()
    faulthandler.register(messages.DUMP_SIGNAL)
    channel = messages.Channel(socket.socket(fileno=fd))
    frames = channel.frames()
    first = next(frames)
    assert first is not None
    begin = messages.decode_inward(first)
    assert isinstance(begin, messages.Begin), "the first frame says how to begin"
    logger = logging.getLogger("infer")
    logger.addHandler(_LogToParent(channel))
    logger.setLevel(begin.log_level)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(frames, commands), daemon=True).start()
    try:
        blueprint: Blueprint = resolve_name(begin.factory)(begin.settings)
        channel.send(messages.Text(blueprint.model_name, blueprint.files))
        core, limits = blueprint.build(
            lambda request_id: channel.send(messages.ComputingAlone(request_id))
        )
        if wrap := os.environ.get(WRAP_VARIABLE):
            core = resolve_name(wrap)(core)
    except LoadError as error:
        channel.send(messages.Refused(ErrorRecord.of(error)))
        return 2
    freeze_heap()
    # A step waits at most this long, in seconds, for a thread that compiles a grammar.
    sys.setswitchinterval(0.001)
    # Few objects are left to collect, so collections are cheap and may be frequent. Each one also
    # clears the interpreter's free lists of tuples (2,000 of each length), which otherwise fill
    # over an hour and look like a leak.
    gc.set_threshold(700, 2, 2)
    channel.send(messages.Ready(limits, core.stats(), blueprint.pinned(core)))

    def report(outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        for part in messages.reports(outputs, core.stats(), step_events):
            channel.send(part)

    try:
        EngineLoop(core, report, commands).run()
    except Exception:
        logger.exception("the engine has failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
