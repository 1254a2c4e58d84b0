"""`pressed_keys`: keys as they are pressed, beside a program that shows a full screen

The terminal is given back as it was when the block is left, when the process is told to end, and
while it is stopped (Ctrl+Z).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from infer.readiness import READABLE, is_ready
from infer.threads import BackgroundThread

ESCAPE = "\x1b"
"""The key Esc."""
_SEQUENCES = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]")
"""What keys such as arrows send; it begins as Esc does."""
_LOOK_S = 0.1
_MAX_BYTES = 64


@contextlib.contextmanager
def pressed_keys(
    on_key: Callable[[str], None], leave: Callable[[], None], enter: Callable[[], None]
) -> Iterator[None]:
    """Call `on_key` with each key that is pressed within the block, from another thread; does
    nothing where stdin is no terminal. In the main thread.

    `leave`, `enter`: leave the full screen before the process stops, and enter it when it goes on.
    A signal that ends the process raises `SystemExit` in the block.
    """
    if not _has_keys():
        yield
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def restore() -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def stop(number: int, _frame: FrameType | None) -> None:
        leave()
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # it goes on here, when it is continued
        signal.signal(number, stop)
        tty.setcbreak(fd)
        enter()

    handlers: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: _end,
        signal.SIGHUP: _end,
        signal.SIGTSTP: stop,
    }
    has_ended = threading.Event()
    reader = BackgroundThread(lambda: _read(fd, has_ended, on_key), has_ended.set, "infer-keys")
    formerly = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setcbreak(fd)
        reader.start()
        yield
    finally:
        reader.stop()
        restore()
        for number, handler in formerly.items():
            signal.signal(number, handler)


def interrupt_main() -> None:
    """Raise `KeyboardInterrupt` in the main thread, even if it waits for something; as Ctrl+C."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _has_keys() -> bool:
    is_main = threading.current_thread() is threading.main_thread()
    try:
        return is_main and os.name == "posix" and sys.stdin.isatty()
    except (ValueError, AttributeError):  # it is closed, or there is none
        return False


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _read(fd: int, has_ended: threading.Event, on_key: Callable[[str], None]) -> None:
    while not has_ended.is_set():
        if not is_ready(fd, READABLE, _LOOK_S):
            continue
        try:
            data = os.read(fd, _MAX_BYTES)
        except OSError:
            return
        if not data:
            return
        for key in _SEQUENCES.sub("", data.decode("utf-8", "replace")):
            on_key(key)
