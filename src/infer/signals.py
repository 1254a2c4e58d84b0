"""Signals: those that ask a server to end, and what its other processes do with them

A terminal sends Ctrl+C (INT) and its own end (HUP) to all processes that were started in it, those
that a server has started included. The server lets its requests finish first, and needs these
processes until then; it ends them itself. They end with it in any case.
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
"""signals that ask a server to end, once its requests have finished"""
_OF_USERS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def leave_signals_to_parent() -> None:
    """Ignore the signals that are meant for the process that has started this one."""
    for number in (*ENDING, *_OF_USERS):
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have the signals of `ENDING` end the process in the block at once; for a server that loads.

    Python's own handler of Ctrl+C raises `KeyboardInterrupt` wherever the main thread is. Inside an
    import, a lock or a callback that breaks something off half-way, or is said and forgotten, and
    the load goes on. The first process of a container gets no signal that has no handler. Does
    nothing for signals that are ignored, and outside of the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    usual = (signal.SIG_DFL, signal.default_int_handler)
    numbers = [each for each in ENDING if is_main and signal.getsignal(each) in usual]
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
    """Open the standard streams that are closed; else a connection would become one of them. From
    now on signals of users may come, which write there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    answer_users()
