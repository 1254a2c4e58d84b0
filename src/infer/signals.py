"""Signals: those that ask a server to end, and what its other processes do with them

A terminal sends Ctrl+C (INT) and its own end (HUP) to all processes that were started in it, those
that a server has started included. The server lets its requests finish first, and needs these
processes until then; it ends them itself. They end with it in any case.

HUP means two things: the terminal is gone, or somebody asks for files to be read again. The system
takes the terminal away before it sends HUP for that, so a process can tell: `Hangup`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator

ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that ask a server to end, once its requests have finished."""
_OF_USERS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def has_terminal() -> bool:
    """Whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Hangup:
    """Tells a HUP that a closed terminal sends from one that asks for files to be read again."""

    def __init__(self) -> None:
        self._had_terminal = has_terminal()

    def is_end(self) -> bool:
        """Whether a HUP that has come now means that the terminal is gone."""
        return self._had_terminal and not has_terminal()

    @contextlib.contextmanager
    def ignored_meanwhile(self) -> Iterator[Hangup]:
        """Until the end of the block, while a server starts and has nothing to read again, HUP does
        nothing unless the terminal is gone. Does nothing where HUP is ignored, and outside of the
        main thread."""
        number = getattr(signal, "SIGHUP", None)
        is_main = threading.current_thread() is threading.main_thread()
        if number is None or not is_main or signal.getsignal(number) is not signal.SIG_DFL:
            yield self
            return
        signal.signal(number, self._end_if_gone)
        try:
            yield self
        finally:
            signal.signal(number, signal.SIG_DFL)

    def _end_if_gone(self, number: int, _frame: object) -> None:
        if self.is_end():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def leave_signals_to_parent() -> None:
    """Ignore the signals that are meant for the process that has started this one."""
    for number in (*ENDING, *_OF_USERS):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have Ctrl+C and SIGTERM end the process in the block at once; for a server that loads.

    Python's own handler of Ctrl+C raises `KeyboardInterrupt` wherever the main thread is. Inside an
    import, a lock or a callback that breaks something off half-way, or is said and forgotten, and
    the load goes on. The first process of a container gets no signal that has no handler. Does
    nothing for signals that are ignored, and outside of the main thread. For HUP see `Hangup`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    usual = (signal.SIG_DFL, signal.default_int_handler)
    ends = (signal.SIGINT, signal.SIGTERM)
    numbers = [ending for ending in ends if is_main and signal.getsignal(ending) in usual]
    handler = signal.SIG_DFL if os.getpid() != 1 else _leave
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _leave(number: int, _frame: object) -> None:
    os._exit(128 + number)


def answer_users() -> None:
    """Have SIGUSR1 write the stacks of all threads to stderr, and SIGUSR2 do nothing; by default
    both end a process. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return
    signal.signal(signal.SIGUSR1, _write_stacks)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _write_stacks(_number: int, _frame: object) -> None:
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no stderr
        print(stacks_of_all(), file=sys.stderr, flush=True)


def stacks_of_all() -> str:
    """The stacks of all threads, the innermost call first, in the form of `faulthandler`.

    That one's own functions walk over frames that they do not hold, so a busy process died of them
    now and then, with the interpreter's lock or without.
    """
    lines = []
    for number, frame in sys._current_frames().items():
        lines.append(f"Thread 0x{number:016x} (most recent call first):")
        for inner, line in traceback.walk_stack(frame):
            code = inner.f_code
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
        lines.append("")
    return "\n".join(lines)


def write_stacks_at(number: int, file: int) -> None:
    """Have a signal write the stacks of all threads to a file descriptor, also while the main
    thread computes in native code; in the main thread.

    A handler in Python would run when that thread comes back. So the interpreter's own handler
    wakes a thread, which writes with the interpreter's lock held; see `_write_stacks`.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(number, lambda *_: None)

    def write() -> None:
        while os.read(reading, 64):
            text = stacks_of_all().encode("utf-8", "replace")
            with contextlib.suppress(OSError):
                while text:
                    text = text[os.write(file, text) :]

    threading.Thread(target=write, name="infer-stacks", daemon=True).start()


def open_standard_streams() -> None:
    """Open the standard streams that are closed; else a connection would become one of them, and
    Python's own would be None. From now on signals of users may come, which write there."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            stream = open(os.devnull, "w" if fd else "r", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)
    answer_users()
