"""The engine process: builds an engine from `Begin`, and runs it until its parent has gone.

`python -m infer.replicas.child FD PARENT STACKS IMPORTS` is started by
`replicas.spawned` with one end of a socket pair, a file for the stacks of its threads, and
the module that it imports before it reads what it is to do, or nothing. Commands are read by a
thread of their own, so that the end of the parent is seen at once, whatever a step is doing. The
process ignores the signals that a terminal or process manager sends to the whole group: its parent
decides when it ends.

After `Prepare` it stands by: it has imported what an engine needs, holds no GPU, and waits for
`Begin` without a thread that computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from pkgutil import resolve_name

import infer.replicas.messages as messages
from infer.child_process import be_known_as, end_with
from infer.engine.build.server_memory import ENGINE_NAME
from infer.engine.commands import Command
from infer.engine.engine_client import HEARTBEAT_S
from infer.engine.loop import Blueprint, EngineLoop, freeze_heap
from infer.errors import LoadError
from infer.load_stages import send_stages
from infer.main_memory import return_freed_memory
from infer.signals import leave_signals_to_parent, write_stacks_at
from infer.types import ErrorRecord, StepOutput
from infer.types.step_events import StepEvents

WRAP_VARIABLE = "INFER_WRAP_CORE"
"""Variable of the environment for tests: `module:function` that gets the engine core and returns
one that fails on purpose."""
STANDBY_NAME = "infer-standby"
"""Name by which `ps` and `top` show the process when it can become an engine."""
_ENGINE_OOM_SCORE, _STANDBY_OOM_SCORE = 500, 1000
"""How early the system ends it when memory runs out; see `oom_score_adj` in proc(5). The parent can
start another engine, and loses nothing with a standby."""
_STANDBY_NICENESS = 5
"""Of what a standby imports. It has a third of the weight of a thread that computes; at 19 it would
have a seventieth, and would not be there within a minute on a machine whose cores are busy."""


class _LogToParent(logging.Handler):
    def __init__(self, channel: messages.Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(messages.Log(record.name, record.levelno, self.format(record)))


def _write_stacks_when_asked(file: int) -> None:
    faulthandler.enable()
    if messages.DUMP_SIGNAL is not None:
        write_stacks_at(messages.DUMP_SIGNAL, file)
    if messages.FORCED_DUMP_SIGNAL is not None:
        faulthandler.register(messages.FORCED_DUMP_SIGNAL, file=file)


def _import(module: str) -> None:
    """Import a module, if there is one; that it cannot be imported is told after `Begin`."""
    with contextlib.suppress(Exception):
        if module:
            import_module(module)


def _prepare(factory: str, channel: messages.Channel) -> None:
    """Import the module of a factory, at a lower priority, and say when that is done. A thread does
    it, because a process may not raise its priority again."""

    def import_all() -> None:
        if hasattr(os, "setpriority") and sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _STANDBY_NICENESS)
        _import(factory.partition(":")[0])

    thread = threading.Thread(target=import_all)
    thread.start()
    thread.join()
    freeze_heap()
    with contextlib.suppress(OSError):
        channel.send(messages.Heartbeat())
    be_known_as(STANDBY_NAME, _STANDBY_OOM_SCORE)


def _next(frames: Iterator[bytes | None]) -> messages.Inward:
    """The next message; ends the process if the parent has gone."""
    frame = next(frames, None)
    if frame is None:
        os._exit(1)
    return messages.decode_inward(frame)


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


def _beat(channel: messages.Channel) -> None:
    """Say that the process lives, until its parent has gone."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(HEARTBEAT_S)
            channel.send(messages.Heartbeat())


def _settle() -> None:
    """Keep what loading has left behind from costing steps time, and the machine memory."""
    freeze_heap()
    return_freed_memory()
    # Few objects are left to collect, so collections are cheap and may be frequent. Each one also
    # clears the interpreter's free lists of tuples (2,000 of each length), which otherwise fill
    # over an hour and look like a leak.
    gc.set_threshold(700, 2, 2)


def main(fd: int, parent: int, stacks: int, imports: str = "") -> int:
    """Run an engine; returns the exit code of the process. `stacks`: descriptor of the file that
    `DUMP_SIGNAL` and `FORCED_DUMP_SIGNAL` write to. `imports`: module that is imported first."""
    leave_signals_to_parent()
    end_with(parent)
    # A step waits at most this long, in seconds, for a thread that compiles a grammar, and loading
    # a model for the one that reads its vocabulary.
    sys.setswitchinterval(0.001)
    _write_stacks_when_asked(stacks)
    channel = messages.Channel(socket.socket(fileno=fd))
    _import(imports)
    frames = channel.frames()
    begin = _next(frames)
    if isinstance(begin, messages.Prepare):
        _prepare(begin.factory, channel)
        begin = _next(frames)
    assert isinstance(begin, messages.Begin), "an engine begins before it gets commands"
    be_known_as(ENGINE_NAME, _ENGINE_OOM_SCORE)
    channel.send(messages.HasBegun())
    logger = logging.getLogger("infer")
    logger.addHandler(_LogToParent(channel))
    logger.setLevel(begin.log_level)
    send_stages()
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(frames, commands), daemon=True).start()
    try:
        blueprint: Blueprint = resolve_name(begin.factory)(begin.settings)
        channel.send(messages.Text(blueprint.model_name, blueprint.files))
        core, limits = blueprint.build(
            lambda request_id: channel.send(messages.IsolatedStep(request_id))
        )
        if wrap := os.environ.get(WRAP_VARIABLE):
            core = resolve_name(wrap)(core)
    except LoadError as error:
        channel.send(messages.Refused(ErrorRecord.of(error)))
        return 2
    fingerprint, pinned = blueprint.fingerprint(core), blueprint.pinned(core)
    del blueprint  # with it go the text files, and the metadata and pages of a GGUF file
    generations = itertools.count(begin.generation)

    def begin_generation() -> None:
        number = next(generations)
        channel.send(messages.Ready(number, limits, core.stats(), fingerprint, pinned))

    begin_generation()
    threading.Thread(target=_beat, args=(channel,), daemon=True).start()
    _settle()  # the server takes as long until the first request

    def report(outputs: list[StepOutput], step_events: StepEvents | None) -> None:
        for part in messages.reports(outputs, core.stats(), step_events, loop.num_applied):
            channel.send(part)

    loop = EngineLoop(core, report, commands, begin_generation)
    try:
        loop.run()
    except Exception:
        logger.exception("the engine has failed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
